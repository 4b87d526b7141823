"""Tests of the controller's state machine: events in, actions out, without Ray."""

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.conductor.role_switching import WorkerLoad
from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.ray import events
from moonserve.deploy.ray.config import parse_cluster
from moonserve.deploy.ray.placement import REFUSAL_S
from moonserve.deploy.ray.state import ACTOR_PATIENCE_S, ControllerState
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import InstanceId, Role
from tests.thoroughness import any_order

DOCUMENT = {
    "prefill": {"count": 2, "cpus": 1, "resources": {"prefill": 1}},
    "decode": {"count": 2, "cpus": 1, "resources": {"decode": 1}},
}
WORKING = {"CPU": 8.0, "prefill": 4.0, "decode": 4.0}


def host(number: int, *, answers: bool = True) -> events.Host:
    """Returns host `number`. Host 0 is the head node, which has no resources for workers."""
    node, address, resources = f"n{number}", f"10.0.0.{number}", WORKING if number else {"CPU": 4.0}
    return events.Host(node_id=node, address=address, resources=resources, is_head=number == 0, answers=answers)


class World:
    """Simulated Ray cluster: actors carry out each action at once; each start gives a process a new, higher epoch."""

    def __init__(self, hosts: int = 4, **document: Any) -> None:
        self.state = ControllerState(parse_cluster({**DOCUMENT, **document}))
        self.now = 0.0
        self.hosts = {number: host(number) for number in range(hosts)}
        self.actors: dict[str, tuple[int, events.Report, str]] = {}  # generation, latest report, node
        self.epochs: dict[str, int] = {}
        self.new_epochs = itertools.count(1)
        self.need = 0.6  # load of each worker
        self.log: list[events.Action] = []

    def tell(self, event: Any) -> list[events.Action]:
        actions = self.state.handle(event, self.now)
        self.state.validate()
        self.log += actions
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Start():
                report = events.Report(stage=events.READY, actor=f"{action.name}#{action.generation}")
                self.actors[action.name] = (action.generation, report, action.host.node_id)
                self.epochs[action.name] = next(self.new_epochs)
            case events.Stop() | events.Kill():
                if self.actors.get(action.name, (0,))[0] == action.generation:
                    del self.actors[action.name]
                    self.epochs.pop(action.name, None)
            case events.Restart():
                generation, report, node = self.actors[action.name]
                again = events.Report(stage=events.READY, life=action.life, actor=report.actor)
                self.actors[action.name] = (generation, again, node)
                self.epochs[action.name] = next(self.new_epochs)
        if isinstance(action, events.Stop):
            self.tell(events.ActorEnded(name=action.name, generation=action.generation))

    def look(self, passed_s: float = 0.5) -> None:
        """Reports the state of hosts, actors and members, as the controller's loop does twice a second."""
        self.now += passed_s
        self.tell(events.HostsObserved(hosts=list(self.hosts.values())))
        answering = {host.node_id for host in self.hosts.values() if host.answers}
        for name, (generation, report, node) in list(self.actors.items()):
            said = report if node in answering else None
            self.tell(events.ActorReported(name=name, generation=generation, report=said))
        same = {"can_change": False, "draining": False, "need": self.need}
        less = {"decode-1": self.need - 0.01}
        loads = [
            WorkerLoad(
                instance_id=InstanceId(name), role=Role(name.partition("-")[0]), use=less.get(name, self.need), **same
            )
            for name in self.epochs
            if name.startswith(("prefill", "decode"))
        ]
        self.tell(events.MembersObserved(epochs=dict(self.epochs), loads=loads))

    def settle(self, looks: int = 40) -> None:
        """Looks until the cluster is whole and three looks caused no action, or at most `looks` times."""
        calm = 0
        for _ in range(looks):
            before = len(self.log)
            self.look()
            is_done = self.state.is_whole and not self.state.is_restarting
            calm = calm + 1 if is_done and len(self.log) == before else 0
            if calm == 3:
                return

    def on(self, node: str) -> set[str]:
        return {name for name, (_, _, its) in self.actors.items() if its == node}


def settled(hosts: int = 4) -> World:
    world = World(hosts)
    world.settle()
    return world


def test_a_cluster_starts_in_the_order_of_dependencies() -> None:
    world = settled()
    assert world.state.is_whole
    kinds = [action.unit.kind for action in world.log if isinstance(action, events.Start)]
    first = {kind: kinds.index(kind) for kind in ProcessKind}
    assert first[ProcessKind.DIRECTORY] < first[ProcessKind.CONDUCTOR] < first[ProcessKind.STORE]
    assert first[ProcessKind.STORE] < min(first[ProcessKind.PREFILL], first[ProcessKind.DECODE])
    assert first[ProcessKind.CONDUCTOR] < first[ProcessKind.GATEWAY]
    assert set(world.actors) == {
        *("directory", "conductor-0", "conductor-1", "gateway-0"),
        *("store-1", "store-2", "store-3"),
        *("prefill-0", "prefill-1", "decode-0", "decode-1"),
    }
    # Processes of one kind are on different hosts, and each worker shares its host with a store.
    for kind in ("conductor", "prefill", "decode"):
        nodes = [node for name, (_, _, node) in world.actors.items() if name.startswith(kind)]
        assert len(set(nodes)) == len(nodes)
    for action in world.log:
        if isinstance(action, events.Start) and action.unit.kind in (ProcessKind.PREFILL, ProcessKind.DECODE):
            assert action.home in world.on(action.host.node_id)


def test_a_process_waits_until_a_host_has_room() -> None:
    world = settled(hosts=1)
    assert not any(name.startswith(("prefill", "decode")) for name in world.actors)
    assert set(world.state.missing()) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    world.hosts[1] = host(1)
    world.settle()
    assert world.state.is_whole


def test_processes_leave_a_host_with_a_silent_raylet_before_ray_notices() -> None:
    world = settled()
    lost = world.on("n2")
    assert lost
    before = len(world.log)
    world.hosts[2] = host(2, answers=False)
    world.look()
    world.hosts[2] = host(2)
    world.settle()
    assert len(world.log) == before  # a short silence causes no action
    world.hosts[2] = host(2, answers=False)
    began_at = world.now
    while world.on("n2"):
        world.look()
    assert world.now - began_at <= world.state.config.silence_s + 1.0
    world.settle()
    assert world.state.is_whole
    killed = {action.name for action in world.log if isinstance(action, events.Kill)}
    assert killed == lost
    moved = lost - {"store-2"}  # a store is bound to its host
    assert moved <= set(world.actors)
    # A process that was started again has a later generation; events about the earlier one change nothing.
    for name in moved:
        first = next(a for a in world.log if isinstance(a, events.Start) and a.name == name)
        assert world.tell(events.ActorEnded(name=name, generation=first.generation)) == []
        assert name in world.state.processes


def test_a_silent_actor_on_a_host_that_answers_is_replaced_only_after_a_while() -> None:
    world = settled()
    generation = world.actors["decode-0"][0]
    silent = events.ActorReported(name="decode-0", generation=generation, report=None)
    assert world.tell(silent) == []
    world.now += ACTOR_PATIENCE_S
    assert [type(action) for action in world.tell(silent)] == [events.Kill, events.Start]


def test_a_host_that_refused_a_process_is_not_retried_at_once() -> None:
    world = settled(hosts=2)
    world.tell(events.ActorEnded(name="decode-0", generation=world.actors.pop("decode-0")[0]))
    world.look()
    assert "decode-0" not in world.state.processes
    world.now += REFUSAL_S
    world.settle()
    assert world.state.is_whole


def test_scaling_adds_the_lowest_absent_number_and_takes_the_highest() -> None:
    world = settled()
    world.tell(events.RemoveProcess(name="prefill-0"))
    world.settle()
    assert "prefill-0" not in world.actors
    world.tell(events.Scale(kind=ProcessKind.PREFILL, count=3))
    world.settle()
    assert {"prefill-0", "prefill-1", "prefill-2"} <= set(world.actors)
    world.tell(events.Scale(kind=ProcessKind.PREFILL, count=1))
    world.settle()
    assert {n for n in world.actors if n.startswith("prefill")} == {"prefill-0"}


def test_an_impossible_operation_is_refused_and_changes_nothing() -> None:
    world = settled()
    before = world.state.to_record()
    for event, words in (
        (events.Scale(kind=ProcessKind.STORE, count=2), "stores follow the hosts"),
        (events.Scale(kind=ProcessKind.DECODE, count=0), "at least 1"),
        (events.Scale(kind=ProcessKind.CONDUCTOR, count=3), "conductors.count"),
        (events.Scale(kind=ProcessKind.GATEWAY, count=2), "gateways.count"),
        (events.RemoveProcess(name="gateway-0"), "the last gateway"),
        (events.RemoveProcess(name="store-1"), "cannot be drained"),
        (events.RemoveProcess(name="decode-7"), "there is no process decode-7"),
        (events.RestartProcesses(names=("x",)), "there is no process x"),
    ):
        with pytest.raises(ConfigError, match=words):
            world.tell(event)
        assert world.state.to_record() == before


def test_one_process_restarts_at_a_time_and_only_while_all_serve() -> None:
    world = settled()
    names = set(world.actors)
    world.tell(events.RestartProcesses())
    restarted = [action.name for action in world.log if isinstance(action, events.Restart)]
    assert len(restarted) == 1
    # The next restart waits until the conductor knows the restarted process.
    epoch = world.epochs.pop(restarted[0])
    world.settle()
    assert len([a for a in world.log if isinstance(a, events.Restart)]) == 1
    world.epochs[restarted[0]] = epoch
    world.settle(80)
    restarted = [action.name for action in world.log if isinstance(action, events.Restart)]
    assert sorted(restarted) == sorted(names)
    assert world.state.is_whole
    assert not world.state.is_restarting


@pytest.mark.parametrize(("need", "names"), [(0.9, {"decode-0", "decode-1", "decode-2"}), (0.1, {"decode-0"})])
def test_a_lasting_load_changes_the_number_of_workers(need: float, names: set[str]) -> None:
    """Lasting load, as the conductor reports it, adds a worker; lasting idleness removes the least used one."""
    terms = {"up_hold_s": 1, "down_hold_s": 1, "cool_down_s": 0}
    world = World(autoscale=terms, decode={**DOCUMENT["decode"], "max": 3})
    world.settle()
    world.need = need
    for _ in range(20):
        world.look()
    world.settle()
    assert world.state.is_whole
    assert {name for name in world.actors if name.startswith("decode")} == names


def test_removal_of_a_cluster_ends_gateways_first_and_leaves_nothing() -> None:
    world = settled()
    names = set(world.actors)
    world.tell(events.RemoveCluster())
    world.settle()
    stopped = [action.name for action in world.log if isinstance(action, events.Stop)]
    assert set(stopped) == names
    assert stopped[0] == "gateway-0"
    assert stopped[-1] == "directory"
    assert world.actors == {}


def test_a_restarted_controller_continues_from_its_record() -> None:
    world = settled()
    world.tell(events.Scale(kind=ProcessKind.DECODE, count=3))
    world.settle()
    again = ControllerState(world.state.config)
    again.restore(world.state.to_record())
    world.state, before = again, len(world.log)
    world.settle()
    assert world.state.is_whole
    assert len(world.log) == before


class AnyOrder(RuleBasedStateMachine):
    """Hosts come and go, actors die, operators scale and restart: afterwards each process runs exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(hosts=3)

    @rule(passed_s=st.sampled_from((0.1, 0.5, 2.0)))
    def look(self, passed_s: float) -> None:
        self.world.look(passed_s)

    @rule(number=st.integers(1, 4), answers=st.booleans())
    def host_comes_or_is_silent(self, number: int, answers: bool) -> None:
        self.world.hosts[number] = host(number, answers=answers)

    @rule(number=st.integers(1, 4))
    def host_goes(self, number: int) -> None:
        self.world.hosts.pop(number, None)

    @precondition(lambda self: self.world.actors)
    @rule(data=st.data())
    def actor_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.actors)))
        generation = self.world.actors.pop(name)[0]
        self.world.epochs.pop(name, None)
        self.world.tell(events.ActorEnded(name=name, generation=generation))

    @rule(kind=st.sampled_from((ProcessKind.PREFILL, ProcessKind.DECODE)), count=st.integers(1, 4))
    def scale(self, kind: ProcessKind, count: int) -> None:
        self.world.tell(events.Scale(kind=kind, count=count))

    @rule()
    def restart(self) -> None:
        self.world.tell(events.RestartProcesses())

    @invariant()
    def books_agree(self) -> None:
        self.world.state.validate()

    def teardown(self) -> None:
        world = self.world
        world.hosts = {number: host(number) for number in range(4)}
        world.settle(400)
        assert world.state.is_whole
        assert {name: p.generation for name, p in world.state.processes.items()} == {
            name: generation for name, (generation, _, _) in world.actors.items()
        }


TestAnyOrder = any_order(AnyOrder, 25, 25)
