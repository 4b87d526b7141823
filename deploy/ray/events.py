"""What the controller of a cluster on Ray hears of, and what it then has done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conductor.roles.controller import WorkerLoad
from deploy.plan import Kind
from deploy.ray.units import Unit

READY = "ready"  # a process's stage once it serves, as the supervisor calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of Ray's nodes."""

    node_id: str
    address: str
    resources: Mapping[str, float]  # in all
    is_head: bool = False
    answers: bool = True  # its raylet, just now


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an actor says of its process."""

    stage: str = "starting"
    fraction: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    failure: str | None = None  # why it does not start
    restarts: int = 0  # after it had died
    life: int = 0  # deliberate restarts
    pid: int | None = None
    actor: str = ""  # another one after Ray has restarted the actor


# -- events


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSeen:
    """All nodes that Ray believes alive."""

    hosts: Sequence[Host]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An actor answered, or, without a report, did not in time."""

    name: str
    generation: int
    report: Report | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An actor has ended: it was stopped, or could not be made, or Ray gave it up."""

    name: str
    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersSeen:
    """What the conductor that leads knows."""

    epochs: Mapping[str, int]  # by instance id
    loads: Sequence[WorkerLoad]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An operator wants so many of a kind."""

    kind: Kind
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """An operator wants this one to finish what it has and go, and none in its place."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAll:
    """An operator wants these to start anew, one after the other; all when there are none."""

    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeDown:
    """An operator wants nothing of it left."""


Event = HostsSeen | Asked | Gone | MembersSeen | Scale | Leave | RestartAll | TakeDown

# -- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """An actor on this host, for this process. Its end, or that it cannot be, is `Gone`."""

    unit: Unit
    name: str
    generation: int
    host: Host
    home: str | None  # the store node there


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """It drains, and its actor ends. Then it is `Gone`."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Its actor is ended, whether it answers or not."""

    name: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Its process drains and starts anew; `Report.life` tells when."""

    name: str
    generation: int
    life: int


Action = Start | Stop | Kill | Restart
