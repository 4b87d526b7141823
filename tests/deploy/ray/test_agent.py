"""Tests of an actor's process over restarts, of the controller's loop when Ray fails, and of scaling by load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.roles.controller import WorkerLoad
from deploy.plan import Kind
from deploy.ports import free_port
from deploy.ray import agent, hosts
from deploy.ray.agent import STOPPED, Assignment, Lives
from deploy.ray.autoscaler import Autoscaler, Change
from deploy.ray.config import ScaleTerms, Workers, parse_cluster
from deploy.ray.events import READY, Host, MembersSeen, Report
from deploy.ray.units import Unit, addresses_of
from protocol.ids import InstanceId, Role
from protocol.pb import conductor_pb2
from protocol.wire import role_to_wire
from tests.patience import answered
from tests.stopping import stop


def directory(folder: Path) -> Assignment:
    document = {
        "conductors": {"count": 2},
        "directory": {"port": free_port()},
        "serve": {"host": "127.0.0.1", "log_dir": str(folder)},
    }
    config = parse_cluster(document)
    return Assignment(
        config=config,
        unit=Unit(Kind.DIRECTORY, 0),
        addresses=addresses_of(config, ("127.0.0.1",), "127.0.0.1"),
        host="127.0.0.1",
        home=None,
        cluster_token="secret",
    )


async def at(lives: Lives, stage: str) -> Report:
    async def asked() -> Report | None:
        report = await lives.report()
        return report if report.stage == stage else None

    return await answered(asked)


async def test_a_stop_during_a_restart_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_is_current", lambda assignment: True)  # Ray does not run here
    lives = Lives(directory(tmp_path))
    await lives.begin()
    try:
        first = await at(lives, READY)
        assert first.pid is not None
        stop(first.pid)  # a stopped process delays its end
        restarting = asyncio.create_task(lives.restart(1))
        await at(lives, STOPPED)
        stopping = asyncio.create_task(lives.end())
        await asyncio.sleep(0)
        os.kill(first.pid, signal.SIGCONT)
        await asyncio.gather(restarting, stopping)
        assert (await lives.report()).stage == STOPPED
    finally:
        await lives.end()


@pytest.fixture
def controller() -> Any:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from deploy.ray import controller

    return controller


async def test_a_start_that_was_not_recorded_is_tried_again(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the record of a start cannot be written, the start is retried: the process does not stay "starting"."""
    document = {"conductors": {"count": 1, "port": free_port()}, "stores": {"enabled": False}}
    away, made = ["head"], []

    def write(config: object, record: object) -> None:
        if away:
            raise RuntimeError("the head is away")

    def make(assignment: Any, host: object, generation: int) -> object:
        made.append(assignment.name)
        return object()

    raylet = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = raylet.sockets[0].getsockname()[1]
    host = Host(node_id="n0", address="127.0.0.1", resources={"CPU": 8.0}, is_head=True, answers=True)
    monkeypatch.setattr(hosts, "REFUSAL_S", 0.0)
    fakes = {"nodes": lambda: [(host, port)], "write_record": write, "make": make}
    for name in ("nodes", "read_record", "write_record", "find", "make", "end"):
        monkeypatch.setattr(controller.actors, name, fakes.get(name, lambda *_: None))
    watch = controller.Watch(parse_cluster(document), "secret")

    async def looked() -> list[str]:
        with contextlib.suppress(RuntimeError):
            await watch._look()
        await asyncio.gather(*watch._tasks, return_exceptions=True)
        return made

    async with raylet:
        assert not await looked()
        away.clear()
        assert await answered(looked) == ["conductor"]


def test_what_the_conductor_says_of_workers_is_their_load(controller: Any) -> None:
    """Members have epochs; workers also have loads, stores do not."""
    load = {"can_switch_role": True, "need": 0.5, "use": 0.25}
    views = [
        conductor_pb2.InstanceView(endpoint={"instance_id": name, "epoch": 3}, role=role_to_wire(role), **load)
        for name, role in (("store-1", Role.STORE), ("decode-0", Role.DECODE))
    ]
    flags = {"can_change": True, "draining": False}
    seen = WorkerLoad(instance_id=InstanceId("decode-0"), role=Role.DECODE, need=0.5, use=0.25, **flags)
    assert controller.members_of(views) == MembersSeen(epochs={"store-1": 3, "decode-0": 3}, loads=[seen])


TERMS = ScaleTerms(high=0.7, low=0.4, up_hold_s=10, down_hold_s=30, cool_down_s=20)
BOUNDS = dict.fromkeys((Role.PREFILL, Role.DECODE), Workers(min=1, max=3))
P, D = Role.PREFILL, Role.DECODE


def loads(
    prefill: list[float], decode: list[float], *, can_change: bool = False, draining: bool = False
) -> list[WorkerLoad]:
    flags = {"can_change": can_change, "draining": draining}
    return [
        WorkerLoad(instance_id=InstanceId(f"{role}-{number}"), role=role, need=load, use=load, **flags)
        for role, own in ((P, prefill), (D, decode))
        for number, load in enumerate(own)
    ]


def changes(scaler: Autoscaler, seen: list[WorkerLoad], start: int, seconds: int) -> list[Change]:
    asked = (scaler.decide(seen, len(seen), now) for now in range(start, start + seconds))
    return [change for change in asked if change is not None]


def test_a_need_that_lasts_gets_a_worker_and_one_that_does_not_gets_none() -> None:
    scaler = Autoscaler(TERMS, BOUNDS)
    busy, calm = loads([0.9], [0.5]), loads([0.5], [0.5])
    assert changes(scaler, busy, 0, 10) == []
    assert changes(scaler, calm, 10, 1) == []
    assert changes(scaler, busy, 11, 10) == []
    assert changes(scaler, busy, 21, 1) == [Change(role=P)]


def test_nothing_follows_before_a_change_has_shown_its_effect() -> None:
    scaler = Autoscaler(TERMS, BOUNDS)
    busy = loads([0.5], [0.9, 0.9])
    assert changes(scaler, busy, 0, 11) == [Change(role=D)]
    assert changes(scaler, busy, 11, 19) == []
    assert changes(scaler, busy, 30, 1) == [Change(role=D)]


@pytest.mark.parametrize(
    ("seen", "seconds", "expected"),
    [
        (loads([0.9] * 3, [0.5]), 100, []),  # the maximum is reached
        (loads([0.0], [0.0]), 100, []),
        (
            loads([0.5], [0.3, 0.1, 0.2]),  # the others can take over the least used worker's work
            31,
            [Change(role=D, leaving=InstanceId("decode-1"))],
        ),
        (loads([0.1] * 2, [0.1] * 2, draining=True), 100, []),
        (loads([0.9] * 2, [0.0] * 2), 15, [Change(role=P)]),  # prefill lacks a worker, and decode is idle
        # The conductor can change a worker's role, which needs no new machine.
        (loads([0.9], [0.1, 0.1], can_change=True), 100, []),
        (loads([0.9], [0.6, 0.6], can_change=True), 11, [Change(role=P)]),
    ],
)
def test_what_follows_a_load_that_lasts(seen: list[WorkerLoad], seconds: int, expected: list[Change]) -> None:
    assert changes(Autoscaler(TERMS, BOUNDS), seen, 0, seconds) == expected


def test_nobody_leaves_while_anybody_comes() -> None:
    idle, scaler = loads([0.1] * 2, [0.1] * 2), Autoscaler(TERMS, BOUNDS)
    assert [scaler.decide(idle, len(idle) + 1, now) for now in range(100)] == [None] * 100


@given(work=st.floats(0.0, 2.5), other=st.floats(0.0, 2.5), count=st.integers(1, 3))
def test_a_constant_load_is_never_answered_by_going_back_and_forth(work: float, other: float, count: int) -> None:
    """With constant load, divided evenly among workers, all changes of a role have the same direction."""
    scaler, counts = Autoscaler(TERMS, BOUNDS), {P: count, D: count}
    steps: dict[Role, list[int]] = {P: [], D: []}
    for now in range(1000):
        seen = loads([work / counts[P]] * counts[P], [other / counts[D]] * counts[D])
        change = scaler.decide(seen, len(seen), now)
        if change is not None:
            step = 1 if change.leaving is None else -1
            counts[change.role] += step
            steps[change.role].append(step)
            assert BOUNDS[change.role].min <= counts[change.role] <= BOUNDS[change.role].most
    assert all(len(set(taken)) <= 1 for taken in steps.values())
