"""Tests of an actor's process over restarts, and of the controller's loop when Ray fails."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moonserve.conductor.role_switching import WorkerLoad
from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.ray import placement, process_actor
from moonserve.deploy.ray.config import parse_cluster
from moonserve.deploy.ray.events import READY, Host, MembersObserved
from moonserve.deploy.ray.process_actor import STOPPED, Assignment, ProcessLives
from moonserve.deploy.ray.processes import PlannedProcess, addresses_of
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import InstanceId, Role
from moonserve.protocol.rpc.wire import role_to_wire
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
        unit=PlannedProcess(ProcessKind.DIRECTORY, 0),
        addresses=addresses_of(config, ("127.0.0.1",), "127.0.0.1"),
        host="127.0.0.1",
        home=None,
        cluster_token="secret",
    )


async def test_a_stop_during_a_restart_stops_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_actor, "_is_current", lambda assignment: True)  # Ray does not run here
    lives = ProcessLives(directory(tmp_path))
    await lives.begin()
    try:
        first = await answered(lives.report, lambda report: report.stage == READY)
        assert first.pid is not None
        stop(first.pid)  # a stopped process delays its end
        restarting = asyncio.create_task(lives.restart(1))
        await answered(lives.report, lambda report: report.stage == STOPPED)
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
    from moonserve.deploy.ray import controller

    return controller


async def test_a_start_whose_record_cannot_be_written_is_retried(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(placement, "REFUSAL_S", 0.0)
    fakes = {"nodes": lambda: [(host, port)], "write_record": write, "create_actor": make}
    for name in ("nodes", "read_record", "write_record", "find_actor", "create_actor", "end_actor"):
        monkeypatch.setattr(controller.ray_calls, name, fakes.get(name, lambda *_: None))
    loop = controller.ControlLoop(parse_cluster(document), "secret")

    async def looked() -> list[str]:
        with contextlib.suppress(RuntimeError):
            await loop._poll()
        await asyncio.gather(*loop._tasks, return_exceptions=True)
        return made

    async with raylet:
        assert not await looked()
        away.clear()
        assert await answered(looked) == ["conductor"]


def test_the_conductors_view_becomes_epochs_and_loads(controller: Any) -> None:
    """Members have epochs; workers also have loads, stores do not."""
    load = {"can_switch_role": True, "need": 0.5, "use": 0.25}
    views = [
        conductor_pb2.InstanceView(endpoint={"instance_id": name, "epoch": 3}, role=role_to_wire(role), **load)
        for name, role in (("store-1", Role.STORE), ("decode-0", Role.DECODE))
    ]
    flags = {"can_change": True, "draining": False}
    seen = WorkerLoad(instance_id=InstanceId("decode-0"), role=Role.DECODE, need=0.5, use=0.25, **flags)
    assert controller.members_of(views) == MembersObserved(epochs={"store-1": 3, "decode-0": 3}, loads=[seen])
