"""Members as protobuf messages and as JSON. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from protocol.errors import PeerError
from protocol.pb import registry_pb2
from protocol.registry.base import Member
from protocol.request import Endpoint
from protocol.wire import from_message, to_message


def members_to_wire(version: int, members: Iterable[Member]) -> registry_pb2.RegistryMembers:
    made = [to_message(registry_pb2.Member, each) for each in members]
    return registry_pb2.RegistryMembers(version=version, members=made)


def members_from_wire(message: registry_pb2.RegistryMembers) -> list[Member]:
    return [from_message(Member, each) for each in message.members]


def member_to_json(member: Member) -> str:
    return json.dumps(dataclasses.asdict(member), separators=(",", ":"), sort_keys=True)


def member_from_json(text: str) -> Member:
    """Raises PeerError for what `member_to_json` did not write; fields of later releases are ignored."""
    try:
        entry: dict[str, Any] = json.loads(text)
        endpoint: dict[str, Any] = entry["endpoint"]
        return Member(
            endpoint=Endpoint(
                instance_id=str(endpoint["instance_id"]),
                epoch=int(endpoint["epoch"]),
                rpc_address=str(endpoint["rpc_address"]),
                transfer_address=str(endpoint["transfer_address"]),
                host=str(endpoint["host"]),
            ),
            role=str(entry["role"]),
            owner=str(entry["owner"]),
            facts={str(name): str(value) for name, value in entry["facts"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError(f"the registry holds a member that cannot be read: {error!r}") from error
