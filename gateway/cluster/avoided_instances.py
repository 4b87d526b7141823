"""Incarnations of instances that a request avoids, and for how long. Pure.

Rule: an instance that failed a request is avoided as an incarnation (id and epoch), since a restarted instance keeps
its name and is welcome. If a placement fails because no other instance is left, instances that only failed get another
chance. A broken instance stays avoided for as long as the conductor may still list dead ones, or until it speaks on a
connection opened after the break: then only the old connection broke.
"""

import math
from collections.abc import Mapping

from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.protocol.request import Endpoint, Placement

# More than the conductor's lease: an incarnation still listed after this long is alive and only its connection broke.
AVOID_LOST_S = 6.0

Incarnation = tuple[str, int]
"""Id and epoch of an instance."""


class AvoidedInstances:
    """Incarnations that one request avoids."""

    def __init__(self) -> None:
        self._failed: set[Incarnation] = set()  # includes those that broke
        self._broke: dict[Incarnation, float] = {}  # time of the break, as far as known

    @property
    def incarnations(self) -> frozenset[Incarnation]:
        return frozenset(self._failed)

    def add(self, endpoint: Endpoint, now: float, *, broke: bool) -> None:
        """Avoids an instance that failed the request. `broke`: it also seems to be dead."""
        incarnation = _incarnation(endpoint)
        self._failed.add(incarnation)
        if broke:
            self._broke[incarnation] = now

    def connected(self, since: Mapping[Incarnation, float]) -> None:
        """Clears the break of each incarnation whose connection was opened after it: that incarnation is alive."""
        for incarnation, opened_at in since.items():
            if opened_at > self._broke.get(incarnation, math.inf):
                del self._broke[incarnation]

    def forgive_failed(self, now: float) -> None:
        """Forgives all instances that only failed, because no instance is left without them."""
        self._failed = {each for each in self._broke if self._may_be_dead(each, now)}

    def dead_among(self, placement: Placement, now: float) -> frozenset[str]:
        """Returns the placement's instances that this gateway takes for dead and the conductor does not yet."""
        return frozenset(
            endpoint.instance_id
            for endpoint in (placement.prefill, placement.decode)
            if self._may_be_dead(_incarnation(endpoint), now)
        )

    def _may_be_dead(self, incarnation: Incarnation, now: float) -> bool:
        broke_at = self._broke.get(incarnation)
        return broke_at is not None and now < broke_at + AVOID_LOST_S

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        assert all(instance_id and epoch >= 0 for instance_id, epoch in self._failed | {*self._broke})


def _incarnation(endpoint: Endpoint) -> Incarnation:
    return endpoint.instance_id, endpoint.epoch


def suspects(reporter: str, error: MoonserveError, placement: Placement) -> set[str]:
    """Returns the instances to avoid: named by the error, else the reporter's lost peer, else the reporter."""
    prefill, decode = placement.prefill.instance_id, placement.decode.instance_id
    named = {prefill, decode} & set(error.ids.values())
    if named:
        return named
    return {decode} if reporter == prefill and isinstance(error, PeerLost) else {reporter}
