"""The embedded registry's own affair: what it shows belongs together."""

from __future__ import annotations

import itertools

import pytest

from protocol.registry.base import Member
from protocol.registry.embedded import EmbeddedRegistry
from tests.protocol.registry.members import member


@pytest.mark.parametrize("ttl_s", range(2, 14))
async def test_a_lease_that_ends_while_it_is_looked_at_is_another_version(ttl_s: int) -> None:
    """Whoever has seen that version waits for the next one, and would never hear of the end."""
    looks = itertools.count()  # a second after each other
    registry = EmbeddedRegistry(clock=lambda: float(next(looks)))
    await registry.join(member(), ttl_s=ttl_s)
    shown: dict[int, list[Member]] = {}
    for _ in range(ttl_s):
        version, members = registry.now()
        assert shown.setdefault(version, members) == members
    assert members == []
    await registry.close()
