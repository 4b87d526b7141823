"""Converts messages of conductor.proto to the conductor's events, with checks, and its cluster view to a message."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from conductor.events import BlockChanges, Heartbeat, Place, Register, Report
from conductor.view import ClusterView
from protocol.errors import InvalidRequest
from protocol.ids import Role
from protocol.keys import BlockKey, unpack_keys
from protocol.pb import conductor_pb2
from protocol.wire import from_message, to_message


def register_from_wire(message: conductor_pb2.RegisterRequest) -> Register:
    """Converts a registration. Raises InvalidRequest if a field is missing or invalid."""
    if not message.endpoint.instance_id:
        raise InvalidRequest("an instance registers with an instance_id")
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
        raise InvalidRequest("a request is placed with a request_id")
    return from_message(Place, message, block_keys=tuple(_keys(message.block_keys)))


def report_from_wire(message: conductor_pb2.ReportRequest) -> Report:
    """Converts a report. Raises InvalidRequest for an unspecified phase."""
    times = {name: _seconds(message, name) for name in ("queue_s", "transfer_s", "prefill_s")}
    try:
        return from_message(Report, message, **times)
    except KeyError as error:
        raise InvalidRequest("a report names its phase") from error


def cluster_to_wire(view: ClusterView) -> conductor_pb2.ClusterView:
    return to_message(
        conductor_pb2.ClusterView,
        view,
        ttft_accuracy=[
            to_message(conductor_pb2.TtftAccuracy, accuracy, term=term.value)
            for term, accuracy in view.ttft_accuracy.items()
        ],
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


def _rate(name: str, bytes_per_s: float) -> float:
    if not 0 <= bytes_per_s < math.inf:
        raise InvalidRequest(f"{name} is {bytes_per_s}; it is finite and at least 0")
    return bytes_per_s


def _seconds(message: conductor_pb2.ReportRequest, name: Any) -> float | None:
    """Returns None if the field is absent or invalid: a worker's broken clock must not cost the whole report."""
    seconds: float = getattr(message, name)
    return seconds if message.HasField(name) and 0 <= seconds < math.inf else None
