"""Which incarnations of instances a request is not to meet again, and for how long. Pure.

The rule: who failed a request is avoided as an incarnation, since a restarted instance has its name and is welcome. A
placing that fails for want of anybody else gives those that only failed another chance; who broke stays avoided for as
long as the conductor may still list the dead, or until it speaks on a new connection: only the old one broke.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from protocol.errors import MoonserveError, PeerLost
from protocol.request import Endpoint, Placement

# More than the conductor's lease: an incarnation still listed that long after its loss lives; only a connection broke.
DOUBT_S = 6.0

Incarnation = tuple[str, int]
"""An instance's id and epoch."""


class Avoidance:
    """Incarnations that one request avoids."""

    def __init__(self) -> None:
        self._failed: set[Incarnation] = set()  # whether or not it broke
        self._broke: dict[Incarnation, float] = {}  # when, as far as we know

    @property
    def incarnations(self) -> frozenset[Incarnation]:
        return frozenset(self._failed)

    def add(self, endpoint: Endpoint, now: float, *, broke: bool) -> None:
        """It failed the request; `broke`: and it seems to be dead."""
        incarnation = _incarnation(endpoint)
        self._failed.add(incarnation)
        if broke:
            self._broke[incarnation] = now

    def connected(self, since: Mapping[Incarnation, float]) -> None:
        """An incarnation that speaks on a connection opened after it broke is alive."""
        for incarnation, opened_at in since.items():
            if opened_at > self._broke.get(incarnation, math.inf):
                del self._broke[incarnation]

    def found_nobody_else(self, now: float) -> None:
        """Without those that are avoided there is no instance."""
        self._failed = {each for each in self._broke if self._may_be_dead(each, now)}

    def dead_among(self, placement: Placement, now: float) -> frozenset[str]:
        """The placement's instances that the conductor has not yet found dead, though we have."""
        return frozenset(
            endpoint.instance_id
            for endpoint in (placement.prefill, placement.decode)
            if self._may_be_dead(_incarnation(endpoint), now)
        )

    def _may_be_dead(self, incarnation: Incarnation, now: float) -> bool:
        broke_at = self._broke.get(incarnation)
        return broke_at is not None and now < broke_at + DOUBT_S

    def validate(self) -> None:
        """Raises AssertionError where the state contradicts itself."""
        assert all(instance_id and epoch >= 0 for instance_id, epoch in self._failed | {*self._broke})


def _incarnation(endpoint: Endpoint) -> Incarnation:
    return endpoint.instance_id, endpoint.epoch


def suspects(reporter: str, error: MoonserveError, placement: Placement) -> set[str]:
    """Which instances to avoid next time: those the error names, else the reporter, else its lost peer."""
    prefill, decode = placement.prefill.instance_id, placement.decode.instance_id
    named = {prefill, decode} & set(error.ids.values())
    if named:
        return named
    if reporter == prefill and isinstance(error, PeerLost):
        return {decode}
    return {reporter}
