"""The machines of a cluster, and `ClusterBuilder`, which builds what a spec describes: conductor, machines,
replacements."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from moonserve.conductor.placement.admission import STEP_SHARE, AdmissionMode, Limits
from moonserve.conductor.placement.policies import make_policy
from moonserve.conductor.role_switching import RoleController
from moonserve.conductor.state import ConductorState
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.request import Endpoint, Placement
from moonserve.protocol.step_time import StepBudget
from moonserve.traces.simulator.batch import Batch
from moonserve.traces.simulator.cluster.request_state import RequestState
from moonserve.traces.simulator.decode import DecodeMachine
from moonserve.traces.simulator.pool import Store
from moonserve.traces.simulator.prefill import PrefillMachine, Prompt
from moonserve.traces.simulator.shared_host import SharedHost
from moonserve.traces.simulator.spec import LATE, ClusterSpec

_DTYPE_BYTES = 2  # of bfloat16; only the layout's number of bytes matters


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """Common state of all kinds of machines."""

    name: str
    machine: PrefillMachine | DecodeMachine | Batch
    epoch: int = 1
    is_alive: bool = True
    is_silent: bool = False  # sends no heartbeats
    is_draining: bool = False  # accepts no new work
    heartbeat_at: float = 0.0  # time of the next heartbeat

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
    landed: set[int] = field(default_factory=set)  # indexes of requests


def layout_of(spec: ClusterSpec) -> KvLayout:
    """Returns a layout with the model's bytes per token. Raises ConfigError if they are not divisible by its layers."""
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


_LEASE_HEARTBEATS = 5  # heartbeat intervals until a silent instance is removed, by default in the conductor
# No placement expires while requests wait for hours in an overload test.
_PLACEMENT_TTL_S = 86_400.0


@dataclass(eq=False, slots=True)
class ClusterBuilder:
    """Builds the machines and the conductor. A prefill group (CPP) has the memory and links of all its machines."""

    spec: ClusterSpec
    host: SharedHost
    cached_now: Callable[[Prompt], int]  # as in `PrefillMachine`, like `publish`
    publish: Callable[[Prompt], None]

    def nodes(self) -> tuple[list[PrefillNode], list[DecodeNode]]:
        """Returns all machines. Raises ConfigError if a fault names an unknown machine."""
        spec = self.spec
        prefills = [
            PrefillNode(name=name, machine=self._prefill_machine(name), store=self._store())
            for name in (f"prefill-{index}" for index in range(spec.num_prefill))
        ]
        decodes = [
            DecodeNode(name=name, machine=self._decode_machine(name))
            for name in (f"decode-{index}" for index in range(spec.num_decode))
        ]
        names = {node.name for node in (*prefills, *decodes)}
        for fault in spec.faults:
            if fault.instance not in names:
                raise ConfigError(f"a fault of {fault.instance!r}; there is no such machine")
        return prefills, decodes

    def conductor(self) -> ConductorState:
        """Returns the conductor's state machine. Raises ConfigError for an unknown policy."""
        spec = self.spec
        limits = Limits(
            ttft_slo_s=spec.ttft_slo_s,
            tbt_slo_s=spec.tbt_slo_s,
            admission=AdmissionMode.PREDICTED if spec.admission == LATE else AdmissionMode(spec.admission),
            lease_s=_LEASE_HEARTBEATS * spec.heartbeat_interval_s,
            heartbeat_interval_s=spec.heartbeat_interval_s,
            placement_ttl_s=_PLACEMENT_TTL_S,
            num_decisions=1,
            tenant_weights=dict(spec.tenant_weights),
            by_priority=spec.scheduling_policy == "priority",
            conditional_disaggregation=spec.conditional,
            chunk_share=spec.chunk_share,
        )
        policy = make_policy(spec.policy, spec.balancing_threshold, spec.seed)
        return ConductorState(policy, limits, RoleController(spec.roles) if spec.roles else None)

    def _prefill_machine(self, name: str) -> PrefillMachine:
        spec = self.spec
        return PrefillMachine(
            spec.model.prefill,
            chunk_tokens=spec.chunk_tokens,
            num_stages=spec.prefill_group,
            mixes_prompts=spec.mixes_prompts,
            fills_steps=spec.model.fills_steps,
            cached_now=self.cached_now,
            publish=self.publish,
            slowdown=partial(self.host.prefill_slowdown, name),
            turnover_s=spec.model.overheads.turnover_s,
        )

    def prompt(self, request: RequestState, placement: Placement, node: PrefillNode, now: float) -> Prompt:
        """Returns the prompt of a request that reaches a machine now."""
        node.num_submitted += 1
        priority = request.record.priority if self.spec.scheduling_policy == "priority" else 0
        return Prompt(
            request_id=request.request_id,
            rank=(priority, now + placement.rank, node.num_submitted),
            num_tokens=request.num_tokens,
            submitted_at=now,
        )

    def _store(self) -> Store:
        """Returns an empty store. Raises ConfigError for an unknown eviction policy."""
        spec = self.spec
        tokens = spec.model.dram_tokens * spec.prefill_group
        disk_tokens = spec.model.disk_tokens * spec.prefill_group
        return Store(tokens // spec.block_size, disk_tokens // spec.block_size, spec.eviction)

    def replace_machine(self, node: Node) -> None:
        """Replaces a node's machine by an idle one."""
        if isinstance(node, PrefillNode):
            node.machine = self._prefill_machine(node.name)
        elif isinstance(node, DecodeNode):
            node.machine = self._decode_machine(node.name)

    def restart(self, node: Node) -> None:
        """Starts a dead machine again, empty except for its disk."""
        node.is_alive = True
        node.epoch += 1
        if isinstance(node, PrefillNode):
            survivors = node.store.on_disk()
            node.store = self._store()
            node.store.restore(survivors)

    def _decode_machine(self, name: str) -> DecodeMachine:
        spec, host = self.spec, self.host
        slowdown = partial(host.decode_slowdown, name) if host.is_shared else None
        refuses = spec.admission == LATE or spec.double_check
        most_step_s = STEP_SHARE * spec.tbt_slo_s if refuses else math.inf
        budget = None
        if spec.conditional:
            budget = StepBudget(
                decode=spec.model.decode,
                prefill=spec.model.prefill,
                max_step_s=spec.chunk_share * spec.tbt_slo_s,
            )
        return DecodeMachine(spec.model, spec.block_size, spec.chunk_tokens, slowdown, most_step_s, budget)

    def links(self, nodes: Iterable[Node]) -> dict[str, float]:
        """Returns the bytes per second of every link: network out and in, memory to devices, disk."""
        model = self.spec.model
        rates = {
            "out": model.nic_bytes_per_s,
            "in": model.nic_bytes_per_s,
            "device": model.device_bytes_per_s,
            "disk": model.disk_bytes_per_s,
        }
        return {
            f"{node.name}/{link}": rate * (self.spec.prefill_group if isinstance(node, PrefillNode) else 1)
            for node in nodes
            for link, rate in rates.items()
        }
