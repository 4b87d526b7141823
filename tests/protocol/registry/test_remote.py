"""The embedded registry in another process, which is stopped and killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from deploy.ports import free_port
from protocol.errors import PeerLost, StaleLease
from protocol.registry.remote import RemoteRegistry
from tests.patience import PATIENCE_S
from tests.protocol.registry.members import member
from tests.stopping import stop


class OtherProcess:
    """Serves an embedded registry until it is killed."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        """On the same port as before, with an empty memory."""
        port = self.address.rpartition(":")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.protocol.registry.serve", port],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


async def test_a_stopped_process_is_peer_lost_within_the_deadline(other: OtherProcess) -> None:
    patient = RemoteRegistry(other.address, "secret", deadline_s=PATIENCE_S)
    registry = RemoteRegistry(other.address, "secret", deadline_s=0.5)
    joined = await patient.join(member())
    stop(other.pid)
    for call in (registry.join, registry.renew, registry.leave):
        with pytest.raises(PeerLost):
            await call(joined)
    other.signal(signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_S):
        joined = await joined_again(patient)
    assert await patient.members() == [joined]
    await patient.close()
    await registry.close()


async def joined_again(registry: RemoteRegistry) -> Any:
    """Past the moment at which the process has just been woken."""
    while True:
        try:
            return await registry.join(member())
        except PeerLost:
            await asyncio.sleep(0.05)


async def test_a_killed_process_forgets_and_its_successor_gives_later_epochs(
    other: OtherProcess,
) -> None:
    registry = RemoteRegistry(other.address, "secret", deadline_s=PATIENCE_S)
    watching: Any = registry.watch()
    async with asyncio.timeout(PATIENCE_S), aclosing(watching):
        before = await registry.join(member())
        assert await anext(watching) == [before]
        other.kill()
        with pytest.raises(PeerLost):
            await registry.members()
        other.start()
        assert await anext(watching) == []
        with pytest.raises(StaleLease, match="forgot"):
            await registry.renew(before)
        fresh = await registry.join(member())
        assert fresh.endpoint.epoch > before.endpoint.epoch
        assert await anext(watching) == [fresh]
    await registry.close()
