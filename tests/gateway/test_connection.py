"""Connections that end are ended once, whoever is first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvloop

from gateway.http.connection import drop
from tests.patience import PATIENCE_S


async def _dropped_after(by_whom: str) -> None:
    """A server's end of a real connection is dropped when it has been ended already, and dropped again."""
    accepted: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
    lost = asyncio.Event()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.put_nowait(cast(asyncio.Transport, transport))  # uvloop's has its methods

        def connection_lost(self, error: Exception | None) -> None:
            lost.set()

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    transport = await accepted.get()
    if by_whom == "client":
        writer.transport.abort()
    else:
        drop(transport)
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
    await asyncio.sleep(0)  # the socket is closed behind the callback
    drop(transport)
    writer.close()
    server.close()


@pytest.mark.parametrize("by_whom", ["client", "server"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_has_ended_may_be_dropped(run: Callable[..., Any], by_whom: str) -> None:
    run(_dropped_after(by_whom))
