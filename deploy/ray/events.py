"""Events that the controller of a cluster on Ray handles, and the actions that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moonserve.conductor.role_switching import WorkerLoad
from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.ray.processes import PlannedProcess

READY = "ready"  # the supervisor's stage of a process that serves


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node of the Ray cluster."""

    node_id: str
    address: str
    resources: Mapping[str, float]  # total
    is_head: bool = False
    answers: bool = True  # the last probe reached its raylet


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An actor's report of its process."""

    stage: str = "starting"
    fraction: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    failure: str | None = None  # reason why it does not start
    restarts: int = 0  # after a death
    life: int = 0  # deliberate restarts
    pid: int | None = None
    actor: str = ""  # changes when Ray restarts the actor


@dataclass(frozen=True, slots=True, kw_only=True)
class PerActor:
    """An event or action about one actor. Actors of one process have different generations."""

    name: str  # of the process
    generation: int


# -- events


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsObserved:
    """All nodes that Ray considers alive."""

    hosts: Sequence[Host]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorReported(PerActor):
    """An actor has answered, or, if there is no report, has not answered in time."""

    report: Report | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorEnded(PerActor):
    """An actor has ended: it was stopped, it could not be created, or Ray gave it up."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersObserved:
    """View of the leading conductor."""

    epochs: Mapping[str, int]  # by instance id
    loads: Sequence[WorkerLoad]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An operator sets the number of processes of a kind."""

    kind: ProcessKind
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveProcess:
    """An operator removes this process after it has finished its requests, without a replacement."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartProcesses:
    """An operator restarts these processes one after the other; without names, all of them."""

    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveCluster:
    """An operator removes the whole cluster."""


Event = (
    HostsObserved
    | ActorReported
    | ActorEnded
    | MembersObserved
    | Scale
    | RemoveProcess
    | RestartProcesses
    | RemoveCluster
)

# -- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(PerActor):
    """Creates the actor of a process on this host. `ActorEnded` reports its end, or that it could not be created."""

    unit: PlannedProcess
    host: Host
    home: str | None  # the store node on that host


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(PerActor):
    """Drains a process and ends its actor. `ActorEnded` follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(PerActor):
    """Ends an actor, even if it does not answer."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(PerActor):
    """Drains a process and starts it again. `Report.life` shows when that is done."""

    life: int


Action = Start | Stop | Kill | Restart
