"""Between the conductor's events and replies and the messages of conductor.proto; nothing else here converts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

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
    SwitchPolicy,
    Traffic,
)
from conductor.gateways import GatewayView
from conductor.policies.global_cache_aware import DEFAULT_BALANCING_THRESHOLD
from conductor.view import ClusterView, InstanceView
from protocol.errors import InvalidRequest
from protocol.ids import InstanceId, RequestId, Role
from protocol.keys import BlockKey, unpack_keys
from protocol.pb import conductor_pb2
from protocol.profile import DEFAULT_DECODE, DEFAULT_PREFILL, DecodeProfile, PrefillProfile
from protocol.wire import (
    decode_profile_from_wire,
    endpoint_from_wire,
    endpoint_to_wire,
    layout_from_wire,
    layout_to_wire,
    prefill_profile_from_wire,
    role_from_wire,
    role_to_wire,
)

_Times = Literal["queue_s", "transfer_s", "prefill_s"]

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
    return Register(
        endpoint=endpoint_from_wire(message.endpoint),
        role=role,
        layout=layout if role is not Role.STORE else None,
        fingerprint=message.fingerprint,
        num_blocks=message.num_blocks,
        prefill_profile=_prefill_profile(message),
        decode_profile=_decode_profile(message),
        home_store=InstanceId(message.home_store) if message.home_store else None,
        max_num_seqs=message.max_num_seqs,
        max_model_len=message.max_model_len,
        bytes_per_s=_rate("transfer_bytes_per_s", message.transfer_bytes_per_s),
        local_bytes_per_s=_rate("local_bytes_per_s", message.local_bytes_per_s),
        can_switch_role=message.can_switch_role,
        max_num_batched_tokens=message.max_num_batched_tokens,
        reads_prompts=message.reads_prompts,
    )


def heartbeat_from_wire(message: conductor_pb2.HeartbeatRequest) -> Heartbeat:
    """Raises InvalidRequest for keys of a wrong length."""
    return Heartbeat(
        instance_id=InstanceId(message.instance_id),
        epoch=message.epoch,
        load=_load(message.load),
        changes=_changes(message.events) if message.HasField("events") else None,
        draining=message.draining,
    )


def deregister_from_wire(message: conductor_pb2.DeregisterRequest) -> Deregister:
    return Deregister(instance_id=InstanceId(message.instance_id), epoch=message.epoch)


def place_from_wire(message: conductor_pb2.PlaceRequest) -> Place:
    """Raises InvalidRequest for keys of a wrong length or a missing id."""
    if not message.request_id:
        raise InvalidRequest("a request is placed with a request_id")
    return Place(
        request_id=RequestId(message.request_id),
        block_keys=tuple(_keys(message.block_keys)),
        num_prompt_tokens=message.num_prompt_tokens,
        max_tokens=message.max_tokens,
        ttft_slo_s=message.ttft_slo_s or None,
        tbt_slo_s=message.tbt_slo_s or None,
        priority=message.priority,
        tenant=message.tenant,
        excluded_instances=frozenset(message.excluded_instances),
        session_id=message.session_id or None,
        client_id=message.client_id,
        ticket=message.ticket,
    )


def report_from_wire(message: conductor_pb2.ReportRequest) -> Report:
    """Raises InvalidRequest for an unspecified phase."""
    phase = _PHASES.get(message.phase)
    if phase is None:
        raise InvalidRequest("a report names its phase")
    return Report(
        request_id=RequestId(message.request_id),
        phase=phase,
        elapsed_s=message.elapsed_s,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        queue_s=_seconds(message, "queue_s"),
        transfer_s=_seconds(message, "transfer_s"),
        prefill_s=_seconds(message, "prefill_s"),
    )


def switch_from_wire(message: conductor_pb2.SetPolicyRequest) -> SwitchPolicy:
    return SwitchPolicy(
        name=message.name,
        balancing_threshold=message.balancing_threshold or DEFAULT_BALANCING_THRESHOLD,
        seed=message.seed,
    )


def rejected_to_wire(rejected: Rejected) -> conductor_pb2.Overloaded:
    return conductor_pb2.Overloaded(
        predicted_ttft_s=rejected.predicted_ttft_s,
        predicted_tbt_s=rejected.predicted_tbt_s,
        retry_after_s=rejected.retry_after_s,
        reason=rejected.reason,
    )


def cluster_to_wire(view: ClusterView) -> conductor_pb2.ClusterView:
    return conductor_pb2.ClusterView(
        instances=_instances(view.instances),
        layout=layout_to_wire(view.layout) if view.layout is not None else None,
        fingerprint=view.fingerprint or "",
        max_model_len=view.max_model_len,
        ready=view.ready,
        ttft_slo_s=view.ttft_slo_s,
        tbt_slo_s=view.tbt_slo_s,
        ttft_accuracy=[
            conductor_pb2.TtftAccuracy(
                term=term.value,
                num_observed=accuracy.num_observed,
                p50=accuracy.p50,
                p90=accuracy.p90,
                bias=accuracy.bias,
            )
            for term, accuracy in view.ttft_accuracy.items()
        ],
    )


def gateway_from_wire(message: conductor_pb2.GatewayView) -> GatewayView:
    return GatewayView(
        instance_id=message.instance_id,
        rpc_address=message.rpc_address,
        host=message.host,
        num_requests=message.num_requests,
    )


def gateway_to_wire(view: GatewayView) -> conductor_pb2.GatewayView:
    return conductor_pb2.GatewayView(
        instance_id=view.instance_id,
        rpc_address=view.rpc_address,
        host=view.host,
        num_requests=view.num_requests,
    )


def _instances(views: Iterable[InstanceView]) -> list[conductor_pb2.InstanceView]:
    return [
        conductor_pb2.InstanceView(
            endpoint=endpoint_to_wire(view.endpoint),
            role=role_to_wire(view.role),
            load=_load_to_wire(view.load),
            num_blocks=view.num_blocks,
            draining=view.draining,
            last_heard_s=view.silent_s,
            indexed_blocks=view.indexed_blocks,
            can_switch_role=view.can_switch_role,
            need=view.need,
            use=view.use,
        )
        for view in views
    ]


def _load_to_wire(load: Load) -> conductor_pb2.Load:
    return conductor_pb2.Load(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        free_blocks=load.free_blocks,
        held_blocks=load.held_blocks,
        leased_blocks=load.leased_blocks,
        context_tokens=load.context_tokens,
        queued_tokens=load.queued_tokens,
        num_preemptions=load.num_preemptions,
        traffic=[
            conductor_pb2.Traffic(
                peer=each.peer,
                read_bytes=each.read_bytes,
                read_s=each.read_s,
                written_bytes=each.written_bytes,
                written_s=each.written_s,
            )
            for each in load.traffic
        ],
        steps=conductor_pb2.Steps(
            num_steps=load.steps.num_steps,
            seconds=load.steps.seconds,
            sequences=load.steps.sequences,
            context_tokens=load.steps.context_tokens,
        ),
        free_bytes=load.free_bytes,
        capacity_bytes=load.capacity_bytes,
        num_blocks=load.num_blocks,
    )


def _load(load: conductor_pb2.Load) -> Load:
    return Load(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        free_blocks=load.free_blocks,
        held_blocks=load.held_blocks,
        leased_blocks=load.leased_blocks,
        context_tokens=load.context_tokens,
        queued_tokens=load.queued_tokens,
        num_preemptions=load.num_preemptions,
        traffic=tuple(map(_traffic, load.traffic)),
        steps=_steps(load.steps) if load.HasField("steps") else NO_STEPS,
        free_bytes=load.free_bytes,
        capacity_bytes=load.capacity_bytes,
        num_blocks=load.num_blocks,
    )


def _traffic(traffic: conductor_pb2.Traffic) -> Traffic:
    return Traffic(
        peer=InstanceId(traffic.peer),
        read_bytes=traffic.read_bytes,
        read_s=traffic.read_s,
        written_bytes=traffic.written_bytes,
        written_s=traffic.written_s,
    )


def _steps(steps: conductor_pb2.Steps) -> Steps:
    return Steps(
        num_steps=steps.num_steps,
        seconds=steps.seconds,
        sequences=steps.sequences,
        context_tokens=steps.context_tokens,
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


def _seconds(message: conductor_pb2.ReportRequest, name: _Times) -> float | None:
    """None where it was not sent or cannot be: a worker's odd clock is no reason to lose the report."""
    seconds: float = getattr(message, name)
    return seconds if message.HasField(name) and 0 <= seconds < math.inf else None
