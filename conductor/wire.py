"""Converts messages of conductor.proto to events, and the cluster view (its instances, and gateways that asked lately)
to a message. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moonserve.conductor.events import BlockChanges, Heartbeat, Load, Place, Register, Report
from moonserve.conductor.peers import ShardSummary
from moonserve.conductor.prediction.accuracy import Term, TermAccuracy
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey, KvLayout, pack_keys, unpack_keys
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import Endpoint, Role
from moonserve.protocol.rpc.wire import from_message, to_message

GATEWAY_LIFETIME_S = 5.0  # gateways request the view once a second, ten times a second while there are no workers
_MAX_GATEWAYS = 1_000  # guards against bugs only: requesting the view needs the cluster token


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One live instance."""

    endpoint: Endpoint
    role: Role
    load: Load
    num_blocks: int
    draining: bool
    last_heard_s: float  # since its last heartbeat
    indexed_blocks: int
    can_switch_role: bool
    need: float  # see `WorkerLoad`; 0 for stores
    use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All live instances and the properties that all workers share."""

    instances: tuple[InstanceView, ...]
    layout: KvLayout | None  # None until the first worker joined
    fingerprint: str | None
    max_model_len: int
    ready: bool  # a prefill and a decode worker accept requests
    ttft_slo_s: float  # default objectives, for requests without their own
    tbt_slo_s: float
    ttft_accuracy: Mapping[Term, TermAccuracy]  # observed terms only


class RecentGateways:
    """Gateways that requested the view recently, by instance id; `now` in monotonic seconds.

    Gateways request the view once a second anyway, so they need no membership of their own; no decision depends on
    them. Clients and dashboards that reach one gateway find the others here.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, conductor_pb2.GatewayView]] = {}

    def record(self, gateway: conductor_pb2.GatewayView, now: float) -> None:
        """Records a gateway's request; its earlier one is replaced."""
        if gateway.instance_id in self._seen or len(self._seen) < _MAX_GATEWAYS:
            self._seen[gateway.instance_id] = (now, gateway)

    def list_recent(self, now: float) -> list[conductor_pb2.GatewayView]:
        """Returns the recent gateways in order of id, and drops silent ones."""
        self._seen = {id: seen for id, seen in self._seen.items() if now - seen[0] < GATEWAY_LIFETIME_S}
        return [self._seen[instance_id][1] for instance_id in sorted(self._seen)]


def register_from_wire(message: conductor_pb2.RegisterRequest) -> Register:
    """Converts a registration. Raises InvalidRequest if a field is missing or invalid."""
    if not message.endpoint.instance_id:
        raise InvalidRequest("a registration needs an instance_id")
    try:
        register = from_message(
            Register,
            message,
            bytes_per_s=_rate("transfer_bytes_per_s", message.transfer_bytes_per_s),
            local_bytes_per_s=_rate("local_bytes_per_s", message.local_bytes_per_s),
        )
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"role or KV layout: {error}") from error
    return register if register.role is not Role.STORE else replace(register, layout=None)


def heartbeat_from_wire(message: conductor_pb2.HeartbeatRequest) -> Heartbeat:
    """Converts a heartbeat. Raises InvalidRequest for block keys of a wrong length."""
    changes = _changes(message.events) if message.HasField("events") else None
    return from_message(Heartbeat, message, changes=changes)


def place_from_wire(message: conductor_pb2.PlaceRequest) -> Place:
    """Converts a placement request. Raises InvalidRequest for block keys of a wrong length or a missing id."""
    if not message.request_id:
        raise InvalidRequest("a placement needs a request_id")
    return from_message(Place, message, block_keys=tuple(_keys(message.block_keys)))


def report_from_wire(message: conductor_pb2.ReportRequest) -> Report:
    """Converts a report. Raises InvalidRequest for an unspecified phase."""
    times = {name: _seconds(message, name) for name in ("queue_s", "transfer_s", "prefill_s")}
    try:
        return from_message(Report, message, **times)
    except KeyError as error:
        raise InvalidRequest("a report needs a known phase") from error


def cluster_to_wire(view: ClusterView) -> conductor_pb2.ClusterView:
    return to_message(
        conductor_pb2.ClusterView,
        view,
        ttft_accuracy=[
            to_message(conductor_pb2.TtftAccuracy, accuracy, term=term.value)
            for term, accuracy in view.ttft_accuracy.items()
        ],
    )


def summary_to_wire(summary: ShardSummary) -> conductor_pb2.ShardSummary:
    keys, branches = pack_keys(list(summary.hot)), list(summary.hot.values())
    return to_message(conductor_pb2.ShardSummary, summary, hot_keys=keys, branches=branches)


def summary_from_wire(message: conductor_pb2.ShardSummary) -> ShardSummary:
    """Converts a summary. Raises InvalidRequest if its hot blocks and branches do not match."""
    keys = _keys(message.hot_keys)
    if len(keys) != len(message.branches):
        raise InvalidRequest(f"{len(keys)} hot blocks with {len(message.branches)} branches")
    return from_message(ShardSummary, message, hot=dict(zip(keys, message.branches, strict=True)))


def _changes(events: conductor_pb2.BlockEvents) -> BlockChanges:
    added, parents = _keys(events.added_keys), _keys(events.added_parents)
    if len(added) != len(parents):
        raise InvalidRequest(f"{len(added)} added keys with {len(parents)} parents")
    return BlockChanges(
        first_seq=events.first_seq,
        next_seq=events.next_seq,
        added=tuple(zip(added, parents, strict=True)),
        removed=tuple(_keys(events.removed_keys)),
        snapshot=events.snapshot,
    )


def _keys(packed: bytes) -> list[BlockKey]:
    try:
        return unpack_keys(packed)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _rate(name: str, bytes_per_s: float) -> float:
    if not 0 <= bytes_per_s < math.inf:
        raise InvalidRequest(f"{name} is {bytes_per_s}; it must be finite and at least 0")
    return bytes_per_s


def _seconds(message: conductor_pb2.ReportRequest, name: Any) -> float | None:
    """Returns None if the field is absent or invalid: a worker's broken clock must not cost the whole report."""
    seconds: float = getattr(message, name)
    return seconds if message.HasField(name) and 0 <= seconds < math.inf else None
