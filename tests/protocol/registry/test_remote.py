"""The embedded registry of another process, which ends and starts again with an empty memory."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest

from deploy.ports import free_port
from protocol.errors import PeerLost, StaleLease
from protocol.registry.remote import RemoteRegistry
from tests.patience import PATIENCE_S
from tests.protocol.registry.conftest import served
from tests.protocol.registry.members import member


async def test_a_registry_that_ended_forgets_and_its_successor_gives_later_epochs() -> None:
    async with served(free_port()) as address:
        registry = RemoteRegistry(address, "secret", deadline_s=PATIENCE_S)
        watching: Any = registry.watch()
        before = await registry.join(member())
        assert await anext(watching) == [before]
    with pytest.raises(PeerLost):
        await registry.members()
    async with served(int(address.rpartition(":")[2])), asyncio.timeout(PATIENCE_S), aclosing(watching):
        assert await anext(watching) == []
        with pytest.raises(StaleLease, match="forgot"):
            await registry.renew(before)
        fresh = await registry.join(member())
        assert fresh.endpoint.epoch > before.endpoint.epoch
        assert await anext(watching) == [fresh]
    await registry.close()


async def test_a_silent_process_is_peer_lost_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        registry = RemoteRegistry(address, "secret", deadline_s=0.05)
        async with asyncio.timeout(PATIENCE_S):
            for call in (registry.join, registry.renew, registry.leave):
                with pytest.raises(PeerLost):
                    await call(member())
            with pytest.raises(PeerLost):
                await registry.members()
        await registry.close()
