"""The machines of a cluster and what each says of itself: registrations and heartbeats. No events of their own.

A prefill machine is two instances for the conductor, as live: the prefill worker and the store node beside it. Blocks
in its memory count as the worker's own too, since it reaches them over its own device link in a few milliseconds, for
which the conductor's estimate is made for machines without one (`conductor.cost.transfer`). With a local pool no
store node registers, so that nobody else can read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from conductor.events import BlockChanges, Event, Heartbeat, Load, Register
from protocol.errors import ConfigError
from protocol.ids import InstanceId, Role
from protocol.layout import KvLayout
from protocol.profile import PrefillProfile
from protocol.request import Endpoint
from traces.simulator.decode import DecodeMachine
from traces.simulator.pool import Store
from traces.simulator.prefill import PrefillMachine
from traces.simulator.spec import ClusterSpec

_DTYPE_BYTES = 2  # of bfloat16; the layout only has to have the right number of bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """What both kinds have in common."""

    name: str
    epoch: int = 1
    is_alive: bool = True
    is_silent: bool = False  # to the conductor
    is_draining: bool = False  # takes nothing new
    beat_at: float = 0.0  # of its next heartbeat

    def endpoint(self, instance_id: str) -> Endpoint:
        return Endpoint(
            instance_id=instance_id,
            epoch=self.epoch,
            rpc_address=instance_id,
            transfer_address=instance_id,
            host=self.name,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillNode(Node):
    """A prefill machine (or group) and its part of the pool."""

    machine: PrefillMachine
    store: Store
    num_submitted: int = 0

    @property
    def store_id(self) -> str:
        return self.name.replace("prefill", "store")


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeNode(Node):
    """A decode machine."""

    machine: DecodeMachine
    landed: set[int] = field(default_factory=set)  # indexes of journeys


def layout_of(spec: ClusterSpec) -> KvLayout:
    """A layout with the model's bytes per token. Raises ConfigError when its layers cannot share them evenly."""
    model = spec.model
    head_dim, rest = divmod(model.kv_bytes_per_token, 2 * model.num_layers * _DTYPE_BYTES)
    if rest or not head_dim:
        raise ConfigError(
            f"{model.name}: {model.kv_bytes_per_token} KV bytes per token are not a multiple of"
            f" {2 * _DTYPE_BYTES} for each of {model.num_layers} layers"
        )
    return KvLayout(
        num_layers=model.num_layers,
        block_size=spec.block_size,
        num_kv_heads=1,
        head_dim=head_dim,
        dtype="bfloat16",
    )


def prefill_registrations(node: PrefillNode, spec: ClusterSpec) -> Iterator[Register]:
    """The store comes first, so that its worker's home is known."""
    model, is_shared = spec.model, spec.pool == "global"
    rate = model.nic_bytes_per_s * spec.prefill_group
    store_id = InstanceId(node.store_id)
    if is_shared:
        yield Register(endpoint=node.endpoint(store_id), role=Role.STORE, bytes_per_s=rate)
    yield Register(
        endpoint=node.endpoint(node.name),
        role=Role.PREFILL,
        layout=layout_of(spec),
        fingerprint=model.name,
        num_blocks=model.device_tokens * spec.prefill_group // spec.block_size,
        prefill_profile=_of_group(model.prefill, spec.prefill_group),
        decode_profile=model.decode,
        home_store=store_id if is_shared else None,
        max_model_len=model.max_model_len,
        bytes_per_s=rate,
        can_switch_role=spec.roles is not None,
    )


def _of_group(profile: PrefillProfile, num_machines: int) -> PrefillProfile:
    """What a group would measure of long prompts: its pipeline is full, and each token costs a share of the time."""
    return PrefillProfile(c0=profile.c0, c1=profile.c1 / num_machines, c2=profile.c2 / num_machines)


def decode_registration(node: DecodeNode, spec: ClusterSpec) -> Register:
    model = spec.model
    return Register(
        endpoint=node.endpoint(node.name),
        role=Role.DECODE,
        layout=layout_of(spec),
        fingerprint=model.name,
        num_blocks=node.machine.num_blocks,
        prefill_profile=model.prefill,
        decode_profile=model.decode,
        max_num_seqs=model.max_num_seqs,
        max_model_len=model.max_model_len,
        bytes_per_s=model.nic_bytes_per_s,
        can_switch_role=spec.roles is not None,
        reads_prompts=spec.conditional,
    )


def prefill_heartbeats(
    node: PrefillNode, spec: ClusterSpec, changes: BlockChanges | None
) -> Iterator[Event]:
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
    return Load(
        free_bytes=store.num_free * block_bytes, capacity_bytes=store.num_blocks * block_bytes
    )


def decode_heartbeat(node: DecodeNode, now: float) -> Heartbeat:
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
    return Heartbeat(
        instance_id=InstanceId(node.name), epoch=node.epoch, load=load, draining=node.is_draining
    )
