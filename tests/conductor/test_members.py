"""Tests of membership: instances join, leave and fall silent, and the prefix index follows."""

import pytest

from moonserve.conductor import events
from moonserve.conductor.wire import GATEWAY_LIFETIME_S, RecentGateways
from moonserve.protocol.errors import Incompatible, InvalidRequest, MoonserveError, NoWorker, StaleLease
from moonserve.protocol.kv_blocks import NO_PARENT, KvLayout
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import InstanceId, Role
from tests.conductor.cluster import Cluster, chain, worker

P0 = InstanceId("p0")
TOLD = events.Registered(heartbeat_interval_s=1.0, lease_s=5.0)
LAYOUT = KvLayout(num_layers=2, block_size=10, num_kv_heads=1, head_dim=8, dtype="bfloat16")


def indexed(cluster: Cluster) -> dict[str, int]:
    views = cluster.state.cluster(cluster.now).instances
    return {view.endpoint.instance_id: view.indexed_blocks for view in views}


def error_of(cluster: Cluster, event: events.Event) -> MoonserveError:
    reply = cluster.send(event)[-1]
    assert isinstance(reply, events.Refused)
    return reply.error


def test_a_worker_joins_once_and_its_next_start_replaces_it_with_its_blocks_and_queue() -> None:
    cluster = Cluster("p0", "d0")
    assert cluster.send(worker("p1", Role.PREFILL)) == [
        events.InstanceJoined(instance_id=InstanceId("p1"), role=Role.PREFILL),
        TOLD,
    ]
    cluster.send(events.Deregister(instance_id=InstanceId("p1"), epoch=1))
    cluster.heartbeat("p0", holds=chain("a", 3))
    cluster.place("r0")
    assert cluster.send(worker("p0", Role.PREFILL)) == [TOLD], "a repeated call changes nothing"
    assert indexed(cluster) == {"p0": 3, "d0": 0}
    assert cluster.send(worker("p0", Role.PREFILL, epoch=2))[:2] == [
        events.InstanceRemoved(instance_id=P0, role=Role.PREFILL, reason=events.RemovalReason.REPLACED),
        events.InstanceJoined(instance_id=P0, role=Role.PREFILL),
    ]
    assert indexed(cluster) == {"p0": 0, "d0": 0}
    assert cluster.place("r1").predicted_ttft_s == 1.0, "the old queue died with its process"
    for stale in (worker("p0", Role.PREFILL), events.Heartbeat(instance_id=P0, epoch=1, load=events.Load())):
        assert isinstance(error_of(cluster, stale), StaleLease)


def test_an_unknown_instance_or_newer_epoch_is_told_to_register() -> None:
    cluster = Cluster("p0", "d0")
    for name, epoch in (("x", 1), ("p0", 2)):
        beat = events.Heartbeat(instance_id=InstanceId(name), epoch=epoch, load=events.Load())
        assert cluster.send(beat) == [events.HeartbeatSeen(known=False)]


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"fingerprint": "f2"}, Incompatible, ["f1", "f2"]),
        ({"layout": LAYOUT}, Incompatible, ["bfloat16", "float32"]),
        ({"layout": None}, InvalidRequest, []),
        ({"fingerprint": ""}, InvalidRequest, []),
        ({"num_blocks": 0}, InvalidRequest, []),
        ({"max_model_len": 1}, InvalidRequest, []),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(changes: dict[str, object], error: type, named: list[str]) -> None:
    cluster = Cluster("p0", "d0")
    found = error_of(cluster, worker("d1", Role.DECODE, **changes))  # type: ignore[arg-type]
    assert isinstance(found, error)
    assert all(name in found.message for name in named)
    assert indexed(cluster).keys() == {"p0", "d0"}


def test_other_model_may_join_after_the_last_worker_has_left() -> None:
    cluster = Cluster("p0", "d0", "s0")
    for name in ("p0", "d0"):
        cluster.send(events.Deregister(instance_id=InstanceId(name), epoch=1))
    assert cluster.state.cluster(cluster.now).fingerprint is None
    cluster.prefill("p0", fingerprint="f2")
    cluster.prefill("p0", epoch=2, fingerprint="f3")
    assert cluster.state.cluster(cluster.now).fingerprint == "f3"


def test_silence_beyond_the_lease_removes_an_instance_and_its_blocks_also_without_a_tick() -> None:
    cluster = Cluster("p0", "d0", "s0")
    cluster.heartbeat("s0", holds=chain("a", 5))
    cluster.now += 4.0
    cluster.heartbeat("p0")
    cluster.heartbeat("d0")
    cluster.now += 1.5
    assert cluster.send(events.Tick()) == [
        events.InstanceRemoved(instance_id=InstanceId("s0"), role=Role.STORE, reason=events.RemovalReason.SILENT)
    ]
    assert cluster.place("r0", keys=chain("a", 9)).prefix_sources == ()
    cluster.now += 2.5
    cluster.heartbeat("d0")
    cluster.now += 4.0
    assert isinstance(cluster.refuse("r0"), NoWorker)
    assert indexed(cluster).keys() == {"d0"}


def test_leaving_twice_or_with_an_old_epoch_is_harmless() -> None:
    cluster = Cluster("p0", "d0")
    cluster.send(events.Deregister(instance_id=P0, epoch=7))
    assert indexed(cluster).keys() == {"p0", "d0"}
    for _ in range(2):
        cluster.send(events.Deregister(instance_id=P0, epoch=1))
        assert indexed(cluster).keys() == {"d0"}


def test_a_draining_instance_gets_no_new_work() -> None:
    cluster = Cluster("p0", "d0", "p1")
    cluster.heartbeat("p0", draining=True)
    assert {cluster.place(f"r{i}").prefill.instance_id for i in range(4)} == {"p1"}
    cluster.heartbeat("p1", draining=True)
    assert isinstance(cluster.refuse("r9"), NoWorker)
    assert not cluster.state.cluster(cluster.now).ready
    cluster.heartbeat("p0", draining=False)
    assert cluster.place("r9").prefill.instance_id == "p0"


def test_missed_block_events_ask_for_a_snapshot_which_heals_the_index() -> None:
    cluster = Cluster("p0", "d0", "s0")
    for added, snapshot, resync, known in ((2, False, True, 0), (4, True, False, 4)):
        changes = events.BlockChanges(
            first_seq=5,
            next_seq=5 + added,
            added=tuple((key, NO_PARENT) for key in chain("a", added)),
            snapshot=snapshot,
        )
        beat = events.Heartbeat(instance_id=InstanceId("s0"), epoch=1, load=events.Load(), changes=changes)
        assert cluster.send(beat) == [events.HeartbeatSeen(known=True, resync=resync)]
        assert indexed(cluster)["s0"] == known


def test_the_cluster_is_ready_with_a_prefill_and_a_decode_worker() -> None:
    cluster = Cluster("s0", "p0")
    assert not cluster.state.cluster(cluster.now).ready
    cluster.decode("d0", max_model_len=300)
    view = cluster.state.cluster(cluster.now)
    assert (view.ready, view.max_model_len) == (True, 300), "the least capable worker's"


def test_gateways_are_listed_while_they_request_the_view() -> None:
    def view(name: str, num_requests: int = 0) -> conductor_pb2.GatewayView:
        return conductor_pb2.GatewayView(instance_id=name, rpc_address="a:1", host="h", num_requests=num_requests)

    gateways = RecentGateways()
    for at, seen in enumerate((view("b", 1), view("a"), view("b", 7))):
        gateways.record(seen, float(at))
    assert gateways.list_recent(2.0) == [view("a"), view("b", 7)]
    assert gateways.list_recent(1.0 + GATEWAY_LIFETIME_S) == [view("b", 7)]
    assert gateways.list_recent(2.0 + GATEWAY_LIFETIME_S) == []
