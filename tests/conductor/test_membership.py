"""Joining, leaving, falling silent, and the prefix index that follows."""

from __future__ import annotations

from dataclasses import replace

from conductor.events import (
    BlockChanges,
    Deregister,
    Heartbeat,
    HeartbeatSeen,
    InstanceJoined,
    InstanceRemoved,
    Load,
    Refused,
    Registered,
    Removal,
    Tick,
)
from protocol.errors import Incompatible, InvalidRequest, NoWorker, StaleLease
from protocol.ids import InstanceId, Role
from protocol.keys import NO_PARENT
from protocol.layout import KvLayout
from tests.conductor.cluster import Cluster, chain, endpoint, pair, worker

P0 = InstanceId("p0")


def indexed(cluster: Cluster, name: str) -> int:
    views = cluster.state.cluster(cluster.now).instances
    return next(v.indexed_blocks for v in views if v.endpoint.instance_id == name)


def names(cluster: Cluster) -> set[str]:
    return {v.endpoint.instance_id for v in cluster.state.cluster(cluster.now).instances}


def test_a_worker_that_joins_is_told_the_heartbeat_and_the_lease() -> None:
    cluster = Cluster()
    assert cluster.send(worker("p0", Role.PREFILL)) == [
        InstanceJoined(instance_id=P0, role=Role.PREFILL),
        Registered(heartbeat_interval_s=1.0, lease_s=5.0),
    ]


def test_a_repeated_registration_changes_nothing() -> None:
    cluster = pair()
    cluster.heartbeat("p0", holds=chain("a", 3))
    actions = cluster.send(worker("p0", Role.PREFILL))
    assert actions == [Registered(heartbeat_interval_s=1.0, lease_s=5.0)]
    assert indexed(cluster, "p0") == 3


def test_a_newer_epoch_replaces_the_older_and_its_blocks() -> None:
    cluster = pair()
    cluster.heartbeat("p0", holds=chain("a", 3))
    cluster.place("r0")
    newer = replace(worker("p0", Role.PREFILL), endpoint=endpoint("p0", epoch=2))
    actions = cluster.send(newer)
    assert actions[:2] == [
        InstanceRemoved(instance_id=P0, role=Role.PREFILL, reason=Removal.REPLACED),
        InstanceJoined(instance_id=P0, role=Role.PREFILL),
    ]
    assert indexed(cluster, "p0") == 0
    assert cluster.place("r1").predicted_ttft_s == 1.0, "the old queue died with its process"


def test_an_older_epoch_is_refused_as_stale_in_registration_and_heartbeat() -> None:
    cluster = Cluster()
    cluster.join(replace(worker("p0", Role.PREFILL), endpoint=endpoint("p0", epoch=2)))
    reply = cluster.send(worker("p0", Role.PREFILL))[-1]
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, StaleLease)
    beat = Heartbeat(instance_id=P0, epoch=1, load=Load())
    reply = cluster.send(beat)[-1]
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, StaleLease)


def test_an_unknown_instance_or_newer_epoch_is_told_to_register() -> None:
    cluster = pair()
    for name, epoch in (("x", 1), ("p0", 2)):
        beat = Heartbeat(instance_id=InstanceId(name), epoch=epoch, load=Load())
        assert cluster.send(beat) == [HeartbeatSeen(known=False)]


def test_a_worker_with_another_fingerprint_is_refused_and_both_are_named() -> None:
    cluster = pair()
    other = replace(worker("d1", Role.DECODE), fingerprint="f2")
    reply = cluster.send(other)[-1]
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, Incompatible)
    assert "f1" in reply.error.message
    assert "f2" in reply.error.message
    assert names(cluster) == {"p0", "d0"}


def test_a_worker_with_another_layout_is_refused_and_both_are_named() -> None:
    cluster = pair()
    layout = KvLayout(num_layers=2, block_size=10, num_kv_heads=1, head_dim=8, dtype="bfloat16")
    reply = cluster.send(replace(worker("d1", Role.DECODE), layout=layout))[-1]
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, Incompatible)
    assert "bfloat16" in reply.error.message
    assert "float32" in reply.error.message


def test_after_the_last_worker_another_model_may_move_in() -> None:
    cluster = pair()
    cluster.store("s0")
    for name in ("p0", "d0"):
        cluster.send(Deregister(instance_id=InstanceId(name), epoch=1))
    assert cluster.state.cluster(cluster.now).fingerprint is None
    cluster.join(replace(worker("p1", Role.PREFILL), fingerprint="f2"))
    assert cluster.state.cluster(cluster.now).fingerprint == "f2"


def test_a_worker_alone_may_come_back_with_another_model() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    newer = replace(worker("p0", Role.PREFILL), endpoint=endpoint("p0", epoch=2), fingerprint="f2")
    cluster.join(newer)
    assert cluster.state.cluster(cluster.now).fingerprint == "f2"


def test_a_worker_without_layout_is_invalid() -> None:
    reply = Cluster().send(replace(worker("p0", Role.PREFILL), layout=None))[-1]
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, InvalidRequest)


def test_silence_beyond_the_lease_removes_an_instance_and_its_blocks() -> None:
    cluster = pair()
    cluster.store("s0")
    cluster.heartbeat("s0", holds=chain("a", 5))
    cluster.now += 4.0
    cluster.heartbeat("p0")
    cluster.heartbeat("d0")
    cluster.now += 1.5
    assert cluster.send(Tick()) == [
        InstanceRemoved(instance_id=InstanceId("s0"), role=Role.STORE, reason=Removal.SILENT)
    ]
    assert cluster.place("r0", keys=chain("a", 9)).prefix_sources == ()


def test_a_silent_instance_is_not_chosen_even_when_no_tick_came() -> None:
    cluster = pair()
    cluster.now += 4.0
    cluster.heartbeat("d0")
    cluster.now += 4.0
    assert isinstance(cluster.refuse("r0"), NoWorker)
    assert names(cluster) == {"d0"}


def test_leaving_twice_or_with_an_old_epoch_is_harmless() -> None:
    cluster = pair()
    cluster.send(Deregister(instance_id=P0, epoch=7))
    assert "p0" in names(cluster)
    cluster.send(Deregister(instance_id=P0, epoch=1))
    cluster.send(Deregister(instance_id=P0, epoch=1))
    assert names(cluster) == {"d0"}


def test_a_draining_instance_gets_no_new_work() -> None:
    cluster = pair()
    cluster.prefill("p1")
    cluster.heartbeat("p0", draining=True)
    assert {cluster.place(f"r{i}").prefill.instance_id for i in range(4)} == {"p1"}
    cluster.heartbeat("p1", draining=True)
    assert isinstance(cluster.refuse("r9"), NoWorker)
    assert not cluster.state.cluster(cluster.now).ready
    cluster.heartbeat("p0", draining=False)
    assert cluster.place("r9").prefill.instance_id == "p0"


def test_missed_block_events_ask_for_a_snapshot_which_heals_the_index() -> None:
    cluster = pair()
    cluster.store("s0")
    keys = chain("a", 4)

    def beat(first: int, added: int, *, snapshot: bool) -> HeartbeatSeen:
        changes = BlockChanges(
            first_seq=first,
            next_seq=first + added,
            added=tuple((key, NO_PARENT) for key in keys[:added]),
            snapshot=snapshot,
        )
        event = Heartbeat(instance_id=InstanceId("s0"), epoch=1, load=Load(), changes=changes)
        reply = cluster.send(event)[-1]
        assert isinstance(reply, HeartbeatSeen)
        return reply

    assert beat(first=5, added=2, snapshot=False) == HeartbeatSeen(known=True, resync=True)
    assert indexed(cluster, "s0") == 0
    assert beat(first=5, added=4, snapshot=True) == HeartbeatSeen(known=True)
    assert indexed(cluster, "s0") == 4


def test_the_cluster_is_ready_with_a_prefill_and_a_decode_worker() -> None:
    cluster = Cluster()
    cluster.store("s0")
    cluster.prefill("p0")
    assert not cluster.state.cluster(cluster.now).ready
    cluster.join(replace(worker("d0", Role.DECODE), max_model_len=300))
    view = cluster.state.cluster(cluster.now)
    assert view.ready
    assert view.max_model_len == 300, "the least capable worker's"
    cluster.state.validate()
