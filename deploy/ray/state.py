"""Places the processes of a cluster on Ray, and decides the actions that bring it to its planned state. Pure.

Rules: a wanted process without a place gets one, in the order of `ProcessKind`. A placed process that is not wanted
drains and leaves. A host whose raylet is silent is lost: its processes are placed elsewhere under the same names, with
a later generation. Any that still run there are fenced by the registry's epochs and by the actor's own check with Ray.
An actor that is silent while its host answers is left to Ray to restart, for a while. One process at a time is
restarted on purpose, and only while the cluster is whole. Knows neither Ray nor what the processes do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moonserve.deploy.launcher.process_specs import ROLES, ProcessKind
from moonserve.deploy.launcher.rolling_restart import RESTART_ORDER
from moonserve.deploy.ray.autoscaler import Autoscaler, Change, ProcessPlan
from moonserve.deploy.ray.config import ClusterConfig
from moonserve.deploy.ray.events import (
    Action,
    ActorEnded,
    ActorReported,
    Event,
    Host,
    HostsObserved,
    Kill,
    MembersObserved,
    RemoveCluster,
    RemoveProcess,
    Restart,
    RestartProcesses,
    Scale,
    Start,
    Stop,
)
from moonserve.deploy.ray.placement import Hosts, Process, choose_host, fits
from moonserve.deploy.ray.processes import Addresses, PlannedProcess, addresses_of, resources_of
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import Role

# For Ray to restart an actor whose worker process died: an interpreter's start takes seconds on a busy machine.
ACTOR_PATIENCE_S = 20.0
FIRST_ANSWER_S = 90.0


class ControllerState:
    """State of one cluster on Ray."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.addresses: Addresses | None = None  # set when the first hosts are seen
        self.is_ending = False
        self.processes: dict[str, Process] = {}
        self.wanted = ProcessPlan(config)
        self._hosts = Hosts(config.silence_s)
        self._conductor_hosts: tuple[str, ...] = ()  # addresses
        self._generation = 0
        self._to_restart: list[str] = []  # names, in order
        self._restarting: str | None = None
        bounds = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        terms = config.autoscale
        self._autoscaler = None if terms is None else Autoscaler(terms, bounds)

    # -- queries

    @property
    def is_whole(self) -> bool:
        """True if every wanted process serves and none is leaving."""
        processes = self.processes.values()
        return (
            self.addresses is not None
            and all(p.serves and not p.is_leaving for p in processes)
            and all(self._process(unit) is not None for unit in self._units())
        )

    @property
    def is_restarting(self) -> bool:
        return self._restarting is not None or bool(self._to_restart)

    def missing(self) -> list[str]:
        """Returns the names of wanted processes that do not serve."""
        named = {unit.name(self.config): self._process(unit) for unit in self._units()}
        return [name for name, process in named.items() if process is None or not process.serves]

    def address_of(self, process: Process) -> str:
        return self._hosts.address_of(process.node_id)

    # -- events

    def handle(self, event: Event, now: float) -> list[Action]:
        """Applies an event and returns the actions. Raises ConfigError and changes nothing if it is impossible."""
        actions = self._apply(event, now)
        if self.is_ending:
            return actions + self._end()
        return [*actions, *self._removals(), *self._starts(now), *self._next_restart()]

    def _apply(self, event: Event, now: float) -> list[Action]:
        match event:
            case HostsObserved(hosts=hosts):
                return self._on_hosts(hosts, now)
            case ActorReported():
                return self._on_report(event, now)
            case ActorEnded():
                self._on_ended(event, now)
            case MembersObserved():
                for process in self.processes.values():
                    process.epoch = event.epochs.get(process.name, 0)
                if self._autoscaler is not None and not (self.is_restarting or self.is_ending):
                    self._scale(self._autoscaler.decide(event.loads, self.wanted.num_workers, now))
            case Scale():
                self.wanted.scale(event.kind, event.count)
            case RemoveProcess(name=name):
                self.wanted.remove(self._named(name).unit)
            case RestartProcesses(names=names):
                named = [self._named(name) for name in names] or self.processes.values()
                order = sorted(named, key=lambda p: (RESTART_ORDER.index(p.unit.kind), p.unit.number))
                self._to_restart += [p.name for p in order if p.name not in self._to_restart]
            case RemoveCluster():
                self.is_ending = True
                self._to_restart.clear()
        return []

    def _on_hosts(self, hosts: Sequence[Host], now: float) -> list[Action]:
        self._hosts.observe(hosts, now)
        if self.addresses is None and hosts:
            self._fix_addresses()
        lost = [p for p in self.processes.values() if self._hosts.is_lost(p.node_id)]
        return [action for process in lost for action in self._give_up(process, "host is lost")]

    def _fix_addresses(self) -> None:
        """Fixes the addresses of the processes that all others must find, permanently."""
        hosts = list(self._hosts)
        able = [host for host in hosts if fits(resources_of(self.config, ProcessKind.CONDUCTOR), host, ())]
        addresses = tuple(dict.fromkeys(host.address for host in able or hosts))
        self._conductor_hosts = addresses[: self.config.conductors.hosts]
        self.addresses = addresses_of(self.config, self._conductor_hosts, hosts[0].address)

    def _on_report(self, event: ActorReported, now: float) -> list[Action]:
        process = self._current(event.name, event.generation)
        if process is None:
            return []
        if event.report is not None:
            last, process.report, process.silent_since = process.report, event.report, None
            if last is not None and last.actor != event.report.actor:
                process.life = event.report.life  # Ray has restarted the actor, and so the process
            return []
        if process.silent_since is None:
            process.silent_since = now
        patience_s = FIRST_ANSWER_S if process.report is None else ACTOR_PATIENCE_S
        return [] if now - process.silent_since < patience_s else self._give_up(process, "actor is silent")

    def _give_up(self, process: Process, reason: str) -> list[Action]:
        self._drop(process)
        return [Kill(name=process.name, generation=process.generation, reason=f"its {reason}")]

    def _on_ended(self, event: ActorEnded, now: float) -> None:
        process = self._current(event.name, event.generation)
        if process is not None:
            self._drop(process)
            if not process.is_leaving:
                self._hosts.refuse(process.node_id, process.unit.kind, now)

    def _drop(self, process: Process) -> None:
        del self.processes[process.name]
        if self._restarting == process.name:
            self._restarting = None  # its replacement is new anyway

    def _scale(self, change: Change | None) -> None:
        if change is not None and change.leaving is None:
            self.wanted.add(ProcessKind(change.role.value))
        elif change is not None and change.leaving in self.processes:
            unit = self.processes[change.leaving].unit
            if self.wanted.counts()[unit.kind] > 1:  # by its first role, which it may have changed
                self.wanted.remove(unit)

    # -- resulting actions

    def _end(self) -> list[Action]:
        """Stops kinds in reverse order, each after the one before is gone. Workers of both roles stop together."""
        remaining = {p.unit.kind for p in self.processes.values()}
        last = next((kind for kind in reversed(ProcessKind) if kind in remaining), None)
        kinds = set(ROLES) if last in ROLES else {last}
        return self._stops(p for p in self.processes.values() if p.unit.kind in kinds)

    def _removals(self) -> list[Action]:
        wanted = set(self._units())
        return self._stops(p for p in self.processes.values() if p.unit not in wanted)

    def _stops(self, processes: Iterable[Process]) -> list[Action]:
        actions: list[Action] = []
        for process in processes:
            if not process.is_leaving:
                process.is_leaving = True
                actions.append(Stop(name=process.name, generation=process.generation))
        return actions

    def _starts(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for unit in self._units():
            if self._process(unit) is None and self._may_start(unit.kind):
                host = self._host_for(unit, now)
                if host is not None:
                    actions.append(self._start(unit, host))
        return actions

    def _start(self, unit: PlannedProcess, host: Host) -> Start:
        self._generation += 1
        name, generation = unit.name(self.config), self._generation
        self.processes[name] = Process(unit, name, host.node_id, generation)
        return Start(unit=unit, name=name, generation=generation, host=host, home=self._home(host))

    def _may_start(self, kind: ProcessKind) -> bool:
        """Returns True if the processes that this kind needs at its start are ready."""
        if kind is ProcessKind.DIRECTORY:
            return True
        if kind is ProcessKind.CONDUCTOR:
            return not self.config.needs_directory or self._has_ready(ProcessKind.DIRECTORY)
        return self._has_ready(ProcessKind.CONDUCTOR)

    def _has_ready(self, kind: ProcessKind) -> bool:
        return any(p.is_ready for p in self.processes.values() if p.unit.kind is kind)

    def _host_for(self, unit: PlannedProcess, now: float) -> Host | None:
        """Returns a host, or None if there is no room or the store node on the chosen host is not ready."""
        suiting = [h for h in self._hosts.usable_for(unit.kind, now) if self._suits(unit, h)]
        host = choose_host(self.config, unit.kind, suiting, list(self.processes.values()))
        if host is None or unit.kind not in ROLES or not self.config.stores.enabled:
            return host
        store = self.processes.get(self._home(host) or "")
        return host if store is not None and store.is_ready else None

    def _suits(self, unit: PlannedProcess, host: Host) -> bool:
        match unit.kind:
            case ProcessKind.STORE:
                return self._hosts.numbers[host.node_id] == unit.number
            case ProcessKind.CONDUCTOR:
                return host.address in self._conductor_hosts
            case ProcessKind.DIRECTORY:
                return host.is_head
        return True

    def _next_restart(self) -> list[Action]:
        """Restarts the next process once everything serves, including the one restarted last."""
        if not self.is_whole:
            return []
        self._restarting = None
        while self._to_restart and self._restarting is None:
            name = self._to_restart.pop(0)
            self._restarting = name if name in self.processes else None
        if self._restarting is None:
            return []
        process = self.processes[self._restarting]
        process.life += 1
        process.epoch_before = process.epoch
        return [Restart(name=process.name, generation=process.generation, life=process.life)]

    # -- parts

    def _units(self) -> list[PlannedProcess]:
        """Returns all wanted units in start order. Each host whose total resources suffice for a store and a worker has
        a store."""
        if self.addresses is None:
            return []
        stores: list[int] = []
        if self.config.stores.enabled:
            store = resources_of(self.config, ProcessKind.STORE)
            shares = [resources_of(self.config, kind) for kind in ROLES]
            stores = [
                self._hosts.numbers[host.node_id]
                for host in self._hosts
                if not self._hosts.is_lost(host.node_id) and any(fits(share, host, (store,)) for share in shares)
            ]
        return self.wanted.units(stores)

    def _home(self, host: Host) -> str | None:
        if not self.config.stores.enabled:
            return None
        return PlannedProcess(ProcessKind.STORE, self._hosts.numbers[host.node_id]).name(self.config)

    def _process(self, unit: PlannedProcess) -> Process | None:
        return self.processes.get(unit.name(self.config))

    def _named(self, name: str) -> Process:
        """Returns the process of this name. Raises ConfigError if there is none."""
        if name not in self.processes:
            raise ConfigError(f"there is no process {name}; `moonserve deploy status` lists all")
        return self.processes[name]

    def _current(self, name: str, generation: int) -> Process | None:
        """Returns the process, or None if the event is about an earlier one of that name."""
        process = self.processes.get(name)
        return process if process is not None and process.generation == generation else None

    # -- for a restarted controller

    def to_record(self) -> dict[str, Any]:
        """Returns the state that only the controller knows, in JSON types, for `restore`."""
        return {
            "wanted": self.wanted.to_record(),
            "numbers": self._hosts.numbers,
            "conductor_hosts": self._conductor_hosts,
            "head": self.addresses.head if self.addresses is not None else None,
            "generation": self._generation,
            "is_ending": self.is_ending,
            "processes": [[p.unit.kind.value, p.unit.number, p.node_id, p.generation] for p in self.processes.values()],
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continues from the record of another controller with this configuration. Pending restarts are forgotten."""
        self.wanted.restore(record["wanted"])
        self._hosts.numbers = dict(record["numbers"])
        self._generation, self.is_ending = record["generation"], record["is_ending"]
        self._conductor_hosts = tuple(record["conductor_hosts"])
        if record["head"] is not None:
            self.addresses = addresses_of(self.config, self._conductor_hosts, record["head"])
        for kind, number, node_id, generation in record["processes"]:
            unit = PlannedProcess(ProcessKind(kind), number)
            name = unit.name(self.config)
            self.processes[name] = Process(unit, name, node_id, generation)

    def validate(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        generations = [p.generation for p in self.processes.values()]
        assert len(set(generations)) == len(generations)
        assert all(generation <= self._generation for generation in generations)
        for name, process in self.processes.items():
            assert name == process.name == process.unit.name(self.config)
        assert self._restarting is None or self._restarting in self.processes
        assert len(set(self._to_restart)) == len(self._to_restart)
        self._hosts.validate()
