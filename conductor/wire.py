"""Between the conductor's events and replies and the messages of conductor.proto; nothing else here converts."""

from __future__ import annotations

import math
from typing import Any

from conductor.events import (
    NO_STEPS,
    BlockChanges,
    Deregister,
    Heartbeat,
    Load,
    Phase,
    Place,
    Register,
    Rejected,
    Report,
    Steps,
    Traffic,
)
from conductor.view import ClusterView, GatewayView, InstanceView
from protocol.errors import InvalidRequest
from protocol.ids import InstanceId, Role
from protocol.keys import BlockKey, unpack_keys
from protocol.pb import conductor_pb2
from protocol.profile import DEFAULT_DECODE, DEFAULT_PREFILL, DecodeProfile, PrefillProfile
from protocol.wire import (
    decode_profile_from_wire,
    endpoint_from_wire,
    endpoint_to_wire,
    from_message,
    layout_from_wire,
    layout_to_wire,
    prefill_profile_from_wire,
    role_from_wire,
    role_to_wire,
    to_message,
)

_PHASES = {
    conductor_pb2.ReportRequest.PHASE_FIRST_TOKEN: Phase.FIRST_TOKEN,
    conductor_pb2.ReportRequest.PHASE_FINISHED: Phase.FINISHED,
    conductor_pb2.ReportRequest.PHASE_FAILED: Phase.FAILED,
    conductor_pb2.ReportRequest.PHASE_CANCELLED: Phase.CANCELLED,
}


def register_from_wire(message: conductor_pb2.RegisterRequest) -> Register:
    """Raises InvalidRequest where a field is missing or makes no sense."""
    if not message.endpoint.instance_id:
        raise InvalidRequest("an instance registers with an instance_id")
    try:
        role = role_from_wire(message.role)
        layout = layout_from_wire(message.layout) if message.HasField("layout") else None
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"role or KV layout: {error}") from error
    return from_message(
        Register,
        message,
        endpoint=endpoint_from_wire(message.endpoint),
        role=role,
        layout=layout if role is not Role.STORE else None,
        prefill_profile=_prefill_profile(message),
        decode_profile=_decode_profile(message),
        home_store=InstanceId(message.home_store) if message.home_store else None,
        bytes_per_s=_rate("transfer_bytes_per_s", message.transfer_bytes_per_s),
        local_bytes_per_s=_rate("local_bytes_per_s", message.local_bytes_per_s),
    )


def heartbeat_from_wire(message: conductor_pb2.HeartbeatRequest) -> Heartbeat:
    """Raises InvalidRequest for keys of a wrong length."""
    return from_message(
        Heartbeat,
        message,
        load=_load(message.load),
        changes=_changes(message.events) if message.HasField("events") else None,
    )


def deregister_from_wire(message: conductor_pb2.DeregisterRequest) -> Deregister:
    return from_message(Deregister, message)


def place_from_wire(message: conductor_pb2.PlaceRequest) -> Place:
    """Raises InvalidRequest for keys of a wrong length or a missing id."""
    if not message.request_id:
        raise InvalidRequest("a request is placed with a request_id")
    return from_message(
        Place,
        message,
        block_keys=tuple(_keys(message.block_keys)),
        ttft_slo_s=message.ttft_slo_s or None,
        tbt_slo_s=message.tbt_slo_s or None,
        excluded_instances=frozenset(message.excluded_instances),
        session_id=message.session_id or None,
    )


def report_from_wire(message: conductor_pb2.ReportRequest) -> Report:
    """Raises InvalidRequest for an unspecified phase."""
    phase = _PHASES.get(message.phase)
    if phase is None:
        raise InvalidRequest("a report names its phase")
    times = {name: _seconds(message, name) for name in ("queue_s", "transfer_s", "prefill_s")}
    return from_message(Report, message, phase=phase, **times)


def rejected_to_wire(rejected: Rejected) -> conductor_pb2.Overloaded:
    return to_message(conductor_pb2.Overloaded, rejected)


def cluster_to_wire(view: ClusterView) -> conductor_pb2.ClusterView:
    return to_message(
        conductor_pb2.ClusterView,
        view,
        instances=[_instance_to_wire(each) for each in view.instances],
        layout=layout_to_wire(view.layout) if view.layout is not None else None,
        ttft_accuracy=[
            to_message(conductor_pb2.TtftAccuracy, accuracy, term=term.value)
            for term, accuracy in view.ttft_accuracy.items()
        ],
    )


def gateway_from_wire(message: conductor_pb2.GatewayView) -> GatewayView:
    return from_message(GatewayView, message)


def gateway_to_wire(view: GatewayView) -> conductor_pb2.GatewayView:
    return to_message(conductor_pb2.GatewayView, view)


def _instance_to_wire(view: InstanceView) -> conductor_pb2.InstanceView:
    return to_message(
        conductor_pb2.InstanceView,
        view,
        endpoint=endpoint_to_wire(view.endpoint),
        role=role_to_wire(view.role),
        load=_load_to_wire(view.load),
        last_heard_s=view.silent_s,
    )


def _load_to_wire(load: Load) -> conductor_pb2.Load:
    return to_message(
        conductor_pb2.Load,
        load,
        traffic=[to_message(conductor_pb2.Traffic, each) for each in load.traffic],
        steps=to_message(conductor_pb2.Steps, load.steps),
    )


def _load(load: conductor_pb2.Load) -> Load:
    return from_message(
        Load,
        load,
        traffic=tuple(from_message(Traffic, each) for each in load.traffic),
        steps=from_message(Steps, load.steps) if load.HasField("steps") else NO_STEPS,
    )


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


def _prefill_profile(message: conductor_pb2.RegisterRequest) -> PrefillProfile:
    if not message.HasField("prefill_profile"):
        return DEFAULT_PREFILL
    return prefill_profile_from_wire(message.prefill_profile)


def _decode_profile(message: conductor_pb2.RegisterRequest) -> DecodeProfile:
    if not message.HasField("decode_profile"):
        return DEFAULT_DECODE
    return decode_profile_from_wire(message.decode_profile)


def _rate(name: str, bytes_per_s: float) -> float:
    if not 0 <= bytes_per_s < math.inf:
        raise InvalidRequest(f"{name} is {bytes_per_s}; it is finite and at least 0")
    return bytes_per_s


def _seconds(message: conductor_pb2.ReportRequest, name: Any) -> float | None:
    """None where it was not sent or cannot be: a worker's odd clock is no reason to lose the report."""
    seconds: float = getattr(message, name)
    return seconds if message.HasField(name) and 0 <= seconds < math.inf else None
