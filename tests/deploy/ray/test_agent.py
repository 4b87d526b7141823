"""The lives of an actor's process follow one another, whoever asks for them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from deploy.plan import Kind
from deploy.ports import free_port
from deploy.ray import agent
from deploy.ray.agent import STOPPED, Assignment, Lives
from deploy.ray.config import parse_cluster
from deploy.ray.events import READY, Report
from deploy.ray.units import Unit, addresses_of
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
    monkeypatch.setattr(agent, "_is_current", lambda assignment: True)  # Ray is not there
    lives = Lives(directory(tmp_path))
    await lives.begin()
    try:
        first = await at(lives, READY)
        assert first.pid is not None
        stop(first.pid)  # its end takes a while
        restarting = asyncio.create_task(lives.restart(1))
        await at(lives, STOPPED)
        stopping = asyncio.create_task(lives.end())
        await asyncio.sleep(0)
        os.kill(first.pid, signal.SIGCONT)
        await asyncio.gather(restarting, stopping)
        assert (await lives.report()).stage == STOPPED
    finally:
        await lives.end()
