"""What happens to a simulated cluster, and when it looks after whom."""

from __future__ import annotations

from typing import NamedTuple

from traces.simulator.journey import Journey
from traces.simulator.machines import Node
from traces.simulator.spec import Fault


class Arrive(NamedTuple):
    """A request of the trace reaches the gateway."""

    journey: Journey


class PlaceAgain(NamedTuple):
    """A pause of the gateway is over; of an earlier attempt it means nothing."""

    journey: Journey
    attempt: int


class LandingKnown(NamedTuple):
    """A prefill machine hears that its prompt has blocks on the decode machine."""

    request_id: str  # of one attempt


class TakeOver(NamedTuple):
    """A decode machine has all KV of a prompt, and has verified it."""

    request_id: str


class Wake(NamedTuple):
    """Something of a machine is due; of the network where there is no machine."""

    node: Node | None


class Beat(NamedTuple):
    """A heartbeat may be due."""

    node: Node


class Consider(NamedTuple):
    """The conductor looks whether a machine should change its role and which prefixes should be copied, and machines
    that change whether they can."""


class FaultBegins(NamedTuple):
    fault: Fault


class FaultEnds(NamedTuple):
    fault: Fault


class Sample(NamedTuple):
    """Time to write down how things stand."""


Event = (
    Arrive
    | PlaceAgain
    | LandingKnown
    | TakeOver
    | Wake
    | Beat
    | Consider
    | FaultBegins
    | FaultEnds
    | Sample
)
