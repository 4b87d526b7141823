"""Members for tests, and waiting for a membership to become what it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from protocol.registry.base import Member, Registry
from protocol.request import Endpoint
from tests.patience import PATIENCE_S


def member(
    instance_id: str = "store-0", *, owner: str = "owner-a", epoch: int = 0, port: int = 7000, **facts: str
) -> Member:
    return Member(
        endpoint=Endpoint(
            instance_id=instance_id,
            epoch=epoch,
            rpc_address=f"127.0.0.1:{port}",
            transfer_address="tcp/1",
            host="host-1",
        ),
        role="store",
        owner=owner,
        facts=facts,
    )


def ids(members: list[Member]) -> list[str]:
    return [member.instance_id for member in members]


async def watched_until(registry: Registry, holds: Callable[[list[Member]], bool]) -> list[Member]:
    """The first membership that a watcher is shown for which `holds` is true."""
    watching: Any = registry.watch()
    async with asyncio.timeout(PATIENCE_S), aclosing(watching):
        async for members in watching:
            if holds(members):
                return list(members)
    raise AssertionError("a watch does not end")
