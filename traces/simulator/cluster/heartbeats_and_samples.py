"""Machines' messages to the conductor, as live (registration, heartbeats, snapshots on request), and periodic samples.

A heartbeat is sent each interval and soon after blocks have changed. A machine that the conductor does not know, or no
longer knows, registers and reports all its blocks. Does not know requests.

For the conductor a prefill machine is two instances, as live: the prefill worker and the store node next to it. Blocks
in its memory also count as the worker's own, because it reads them over its own device link in a few milliseconds. The
conductor's estimate is made for machines without such a link (`conductor.prediction.transfer_time`). With a local pool,
no store node registers, so that no other machine can read the blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from moonserve.conductor.events import BlockChanges, Event, Heartbeat, HeartbeatSeen, Load, Refused, Register
from moonserve.conductor.state import ConductorState
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.protocol.request import InstanceId, Role
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.nodes import DecodeNode, Node, PrefillNode, layout_of
from moonserve.traces.simulator.prefill import PrefillMachine
from moonserve.traces.simulator.results import InstanceSample, ReplicaSample
from moonserve.traces.simulator.spec import ClusterSpec

GATHER_S = 0.02  # as `protocol.membership.heartbeats.GATHER_S`: several changes share one message


class HeartbeatSender:
    """Reports all machines to the conductor."""

    def __init__(self, spec: ClusterSpec, conductor: ConductorState) -> None:
        self._spec = spec
        self._conductor = conductor
        self.num_heartbeats = 0

    def register(self, node: Node, now: float) -> None:
        """Registers a machine that is new, or that the conductor has forgotten."""
        assert isinstance(node, PrefillNode | DecodeNode)
        self._send(_registrations(node, self._spec), now)
        if isinstance(node, PrefillNode):
            self._send(_prefill_heartbeats(node, self._spec, node.store.snapshot()), now)
        node.heartbeat_at = now + self._spec.heartbeat_interval_s

    def send_heartbeat(self, node: Node, now: float) -> None:
        """Sends a machine's heartbeats, and a registration or snapshot if the conductor requests one."""
        node.heartbeat_at = now + self._spec.heartbeat_interval_s
        if node.is_silent:
            return
        self.num_heartbeats += 1
        if isinstance(node, PrefillNode):
            seen = self._send(_prefill_heartbeats(node, self._spec, node.store.take_changes()), now)
        else:
            assert isinstance(node, DecodeNode)
            seen = self._send([_decode_heartbeat(node, now)], now)
        if not all(each.known for each in seen):
            self.register(node, now)
        elif any(each.resync for each in seen) and isinstance(node, PrefillNode):
            self._send(_prefill_heartbeats(node, self._spec, node.store.snapshot()), now)

    def advance_heartbeat(self, node: PrefillNode, now: float) -> bool:
        """Checks a machine's blocks for changes. Returns True if that brings its next heartbeat forward."""
        due_at = now + GATHER_S
        if not node.store.has_changes or node.heartbeat_at <= due_at:
            return False
        node.heartbeat_at = due_at
        return True

    def _send(self, events: Iterable[Event], now: float) -> list[HeartbeatSeen]:
        seen: list[HeartbeatSeen] = []
        for event in events:
            reply = self._conductor.handle(event, now)[-1]
            if isinstance(reply, Refused):
                raise reply.error
            if isinstance(reply, HeartbeatSeen):
                seen.append(reply)
        return seen


def _registrations(node: PrefillNode | DecodeNode, spec: ClusterSpec) -> Iterator[Register]:
    """Yields a machine's registrations. The store comes first, so that the worker's home is known."""
    model, group, home = spec.model, 1, None
    if isinstance(node, PrefillNode):
        group, home = spec.prefill_group, InstanceId(node.store_id)
    rate = model.nic_bytes_per_s * group
    if home is not None and spec.pool == "global":
        yield Register(endpoint=node.endpoint(home), role=Role.STORE, bytes_per_s=rate)
    yield Register(
        endpoint=node.endpoint(node.name),
        role=Role.DECODE if home is None else Role.PREFILL,
        layout=layout_of(spec),
        fingerprint=model.name,
        num_blocks=model.device_tokens * group // spec.block_size,
        # As a group would measure long prompts: with a full pipeline, each token costs its share of the time.
        prefill_profile=replace(model.prefill, c1=model.prefill.c1 / group, c2=model.prefill.c2 / group),
        decode_profile=model.decode,
        home_store=home if spec.pool == "global" else None,
        max_num_seqs=model.max_num_seqs if home is None else 0,
        max_model_len=model.max_model_len,
        bytes_per_s=rate,
        can_switch_role=spec.roles is not None,
        reads_prompts=home is None and spec.conditional,
    )


def _prefill_heartbeats(node: PrefillNode, spec: ClusterSpec, changes: BlockChanges | None) -> Iterator[Event]:
    machine = node.machine
    load = Load(
        num_waiting=machine.num_waiting,
        num_running=machine.num_running,
        queued_tokens=machine.queued_tokens,
    )
    if spec.pool == "global":
        store, block_bytes = node.store, spec.model.kv_bytes_per_token * spec.block_size
        yield Heartbeat(
            instance_id=InstanceId(node.store_id),
            epoch=node.epoch,
            load=Load(free_bytes=store.num_free * block_bytes, capacity_bytes=store.num_blocks * block_bytes),
            changes=changes,
        )
    yield Heartbeat(
        instance_id=InstanceId(node.name),
        epoch=node.epoch,
        load=load,
        changes=changes,
        draining=node.is_draining,
    )


def _decode_heartbeat(node: DecodeNode, now: float) -> Heartbeat:
    machine = node.machine
    load = Load(
        num_waiting=machine.num_waiting,
        num_running=machine.num_running,
        free_blocks=machine.free_blocks,
        held_blocks=machine.num_blocks - machine.free_blocks - machine.leased_blocks,
        leased_blocks=machine.leased_blocks,
        context_tokens=machine.context_tokens(now),
        num_preemptions=machine.num_preemptions,
    )
    return Heartbeat(instance_id=InstanceId(node.name), epoch=node.epoch, load=load, draining=node.is_draining)


def block_key_of(hash_id: int) -> BlockKey:
    """Returns the block key for a hash id of a trace. Both are equal where the prefix is."""
    return BlockKey((hash_id + 1).to_bytes(KEY_BYTES, "little"))


class SampleSeries:
    """The samples of one run."""

    def __init__(self, records: Iterable[TraceRecord], num_ranks: int) -> None:
        """`records`: the whole trace. `num_ranks`: number of most popular blocks to follow."""
        hash_ids = (hash_id for record in records for hash_id in record.hash_ids)
        self._row_of = {hash_id: row for row, hash_id in enumerate(dict.fromkeys(hash_ids))}
        self._hash_ids = list(self._row_of)
        self._uses = np.zeros(len(self._row_of), np.int64)
        self._num_ranks = num_ranks
        self.instances: list[InstanceSample] = []
        self.replicas: list[ReplicaSample] = []

    def count_uses(self, hash_ids: Sequence[int]) -> None:
        """Counts the arrival of a prompt with these blocks."""
        self._uses[[self._row_of[hash_id] for hash_id in hash_ids]] += 1

    def take(self, prefills: Sequence[PrefillNode], others: Sequence[Node], now: float) -> None:
        for node in (*prefills, *others):
            self.instances.append(sample_of(node, now))
        # Among equally popular blocks, the one used first comes first.
        order = np.argsort(-self._uses, kind="stable")[: self._num_ranks]
        keys = [block_key_of(self._hash_ids[row]) for row in order[self._uses[order] > 0]]
        counts = np.zeros(len(keys), np.int64)
        for node in prefills:
            counts += np.array(node.store.present(keys), np.int64)
        self.replicas.append(ReplicaSample(at_s=now, replicas=tuple(counts.tolist())))


def sample_of(node: Node, now: float) -> InstanceSample:
    machine = node.machine
    context = 0 if isinstance(machine, PrefillMachine) else machine.context_tokens(now)
    queue_s = machine.queue_s() if isinstance(machine, PrefillMachine) else 0.0
    return InstanceSample(
        at_s=now,
        instance_id=node.name,
        queued=machine.num_waiting,
        running=machine.num_running,
        context_tokens=context,
        predicted_queue_s=queue_s,
    )
