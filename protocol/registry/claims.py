"""What a registry accepts: bounds on members, leases and epochs, the same for every implementation. Pure.

Rule: what is refused here would otherwise be kept for all to read, or make an id unusable for ever.
"""

from __future__ import annotations

import math

from protocol.errors import InvalidRequest
from protocol.registry.base import Member

MAX_ID_CHARS = 200
MAX_FACTS_CHARS = 16 * 1024
"""Every watcher receives every member's facts at each change."""
MAX_TTL_S = 24 * 3600.0
MAX_EPOCH = 2**62
"""Epochs start near the time in ns (2**61 is the year 2043) and travel as signed 64-bit numbers in Redis."""


def check_join(member: Member, ttl_s: float) -> None:
    """Raises InvalidRequest for what no registry may keep."""
    _check_name("instance id", member.instance_id)
    _check_name("owner", member.owner)
    _check_name("role", member.role)
    check_ttl(ttl_s)
    if not 0 <= member.endpoint.epoch < MAX_EPOCH:
        raise InvalidRequest(
            f"epoch {member.endpoint.epoch} is not in 0 … {MAX_EPOCH - 1}",
            instance_id=member.instance_id,
        )
    if sum(len(name) + len(value) for name, value in member.facts.items()) > MAX_FACTS_CHARS:
        raise InvalidRequest(
            f"facts of more than {MAX_FACTS_CHARS} characters", instance_id=member.instance_id
        )


def check_ttl(ttl_s: float) -> None:
    # A NaN fails both comparisons.
    if not (0 < ttl_s <= MAX_TTL_S and math.isfinite(ttl_s)):
        raise InvalidRequest(
            f"a lease of {ttl_s} s; it must be above 0 and at most {MAX_TTL_S:.0f}"
        )


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_ID_CHARS or not name.isprintable():
        raise InvalidRequest(
            f"{what} {name[:MAX_ID_CHARS]!r} must be 1 to {MAX_ID_CHARS} printable characters"
        )
