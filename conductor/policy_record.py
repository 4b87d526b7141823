"""The placement policy that was set while conductors ran, kept where whoever leads next finds it and begins with it.

It is a member of the registry that any leader may be, under one owner, with the policy as its facts. A lease there ends
after a day, so that the leader writes it again before. Knows no policy and no leadership.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from protocol.membership import own_endpoint
from protocol.pb import conductor_pb2
from protocol.registry.base import Member, Registry

RECORD_ID = "conductor-policy"
TTL_S = 24 * 3600.0
"""The longest that a registry grants."""
WRITE_EVERY_S = 3600.0


def record_of(policy: conductor_pb2.SetPolicyRequest) -> Member:
    endpoint = own_endpoint(RECORD_ID, rpc_address="", transfer_address="")
    return Member(
        endpoint=dataclasses.replace(endpoint, epoch=0),  # the registry gives it
        role=RECORD_ID,
        owner=RECORD_ID,
        facts={
            "name": policy.name,
            "balancing_threshold": repr(policy.balancing_threshold),
            "seed": str(policy.seed),
        },
    )


def policy_among(members: Iterable[Member]) -> conductor_pb2.SetPolicyRequest | None:
    """None where none was set, or what is kept cannot be read."""
    for member in members:
        if member.instance_id == RECORD_ID:
            try:
                return conductor_pb2.SetPolicyRequest(
                    name=member.facts["name"],
                    balancing_threshold=float(member.facts["balancing_threshold"]),
                    seed=int(member.facts["seed"]),
                )
            except (KeyError, ValueError):
                return None
    return None


async def write(registry: Registry, policy: conductor_pb2.SetPolicyRequest) -> None:
    """Raises PeerLost among others where the registry does not take it."""
    await registry.join(record_of(policy), ttl_s=TTL_S)
