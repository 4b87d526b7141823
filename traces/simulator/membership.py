"""Machines' messages to the conductor, as live: registration, heartbeats, and snapshots on request.

A heartbeat is sent each interval and soon after blocks have changed. A machine that the conductor does not know, or no
longer knows, registers and reports all its blocks. Does not know requests.

For the conductor a prefill machine is two instances, as live: the prefill worker and the store node next to it. Blocks
in its memory also count as the worker's own, because it reads them over its own device link in a few milliseconds. The
conductor's estimate is made for machines without such a link (`conductor.cost.bandwidth`). With a local pool, no store
node registers, so that no other machine can read the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from conductor.events import BlockChanges, Event, Heartbeat, HeartbeatSeen, Load, Refused, Register
from conductor.state import ConductorState
from protocol.ids import InstanceId, Role
from traces.simulator.machines import DecodeNode, Node, PrefillNode, layout_of
from traces.simulator.pool import Store
from traces.simulator.spec import ClusterSpec

GATHER_S = 0.02  # as `protocol.membership.GATHER_S`: several changes share one message


class Membership:
    """Reports all machines to the conductor."""

    def __init__(self, spec: ClusterSpec, conductor: ConductorState) -> None:
        self._spec = spec
        self._conductor = conductor
        self.num_heartbeats = 0

    def register(self, node: Node, now: float) -> None:
        """Registers a machine that is new, or that the conductor has forgotten."""
        assert isinstance(node, PrefillNode | DecodeNode)
        self._tell(_registrations(node, self._spec), now)
        if isinstance(node, PrefillNode):
            self._tell(_prefill_heartbeats(node, self._spec, node.store.snapshot()), now)
        node.beat_at = now + self._spec.heartbeat_interval_s

    def beat(self, node: Node, now: float) -> None:
        """Sends a machine's heartbeats, and a registration or snapshot if the conductor requests one."""
        node.beat_at = now + self._spec.heartbeat_interval_s
        if node.is_silent:
            return
        self.num_heartbeats += 1
        if isinstance(node, PrefillNode):
            changes = node.store.take_changes()
            seen = self._tell(_prefill_heartbeats(node, self._spec, changes), now)
        else:
            assert isinstance(node, DecodeNode)
            seen = self._tell([_decode_heartbeat(node, now)], now)
        if not all(each.known for each in seen):
            self.register(node, now)
        elif any(each.resync for each in seen) and isinstance(node, PrefillNode):
            self._tell(_prefill_heartbeats(node, self._spec, node.store.snapshot()), now)

    def changed(self, node: PrefillNode, now: float) -> bool:
        """Checks a machine's blocks for changes. Returns True if that brings its next heartbeat forward."""
        due_at = now + GATHER_S
        if not node.store.has_news or node.beat_at <= due_at:
            return False
        node.beat_at = due_at
        return True

    def _tell(self, events: Iterable[Event], now: float) -> list[HeartbeatSeen]:
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
        yield Heartbeat(
            instance_id=InstanceId(node.store_id),
            epoch=node.epoch,
            load=_load_of(node.store, spec),
            changes=changes,
        )
    yield Heartbeat(
        instance_id=InstanceId(node.name),
        epoch=node.epoch,
        load=load,
        changes=changes,
        draining=node.is_draining,
    )


def _load_of(store: Store, spec: ClusterSpec) -> Load:
    block_bytes = spec.model.kv_bytes_per_token * spec.block_size
    return Load(free_bytes=store.num_free * block_bytes, capacity_bytes=store.num_blocks * block_bytes)


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
