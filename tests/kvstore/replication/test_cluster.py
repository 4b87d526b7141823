"""Replicas that come and go between real nodes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from protocol.pb.directory_pb2 import StoreNodeView
from tests.kvstore.directory.cluster import (
    Questions,
    asking,
    put_chain,
    read_chain,
    running_directory,
    running_store,
    value,
)
from tests.kvstore.nodes import connected
from tests.patience import answered
from tests.ports import free_port

WANTED = b"".join(map(value, range(1, 9)))


async def until_replicas(asks: Questions, keys: list[BlockKey], count: int) -> set[str]:
    """All keys have so many, on the same nodes: their names."""
    found: set[str] = set()

    async def as_wanted() -> bool:
        nonlocal found
        holders = [set(nodes) for nodes in await asks.holders(keys)]
        found = holders[0]
        return all(nodes == found for nodes in holders) and len(found) == count

    await answered(as_wanted)
    return found


async def until_hot(asks: Questions, node: StoreNodeView, keys: list[BlockKey]) -> str:
    """Reads, on a busy machine slowly, for as long as there is no whole replica; the name of who has it."""
    replicas: set[str] = set()
    while not replicas:
        await read_chain(node, keys, times=9)
        holders = [set(nodes) for nodes in await asks.holders(keys)]
        replicas = set.intersection(*holders) - {node.endpoint.instance_id}
    [replica] = replicas
    return replica


@pytest.mark.slow  # a hot block is replicated at the next look, one second later, and cools for four
async def test_a_hot_chain_gains_a_replica_that_reads_back_and_loses_it_when_it_is_cold() -> None:
    port = free_port()
    flags = ("--hot-cool-s", "4", "--hot-extra-replicas", "1")
    with contextlib.ExitStack() as processes:
        processes.enter_context(running_directory(*flags, port=port))
        for name in ("a", "b", "c"):
            processes.enter_context(running_store(name, port))
        async with asking(port) as asks:
            await asks.until_in_step("a", "b", "c")
            nodes = await asks.nodes()
            keys = await put_chain(nodes["a"], range(1, 9))
            replica = await until_hot(asks, nodes["a"], keys)
            assert await read_chain(nodes[replica], keys) == WANTED
            assert await until_replicas(asks, keys, 1) == {"a"}
            assert await read_chain(nodes["a"], keys) == WANTED


@pytest.mark.slow  # four processes start
async def test_asked_for_replicas_are_made_with_what_leads_to_them_and_taken_away_again() -> None:
    """One wish right behind another: what was just stored is not missing, what was just made can be taken away."""
    port = free_port()
    with contextlib.ExitStack() as processes:
        processes.enter_context(running_directory(port=port))
        for name in ("a", "b", "c"):
            processes.enter_context(running_store(name, port))
        async with asking(port) as asks:
            await asks.until_in_step("a", "b", "c")
            nodes = await asks.nodes()
            keys = await put_chain(nodes["a"], range(1, 9))
            reply = await asks.change(keys[-2:], 3)
            assert (reply.created, reply.dropped, reply.missing) == (16, 0, 0)
            reply = await asks.change([*keys, BlockKey(bytes([7]) * 16)], 1)
            assert (reply.created, reply.dropped, reply.missing) == (0, 16, 1)
            await until_replicas(asks, keys, 1)
            reply = await asks.change(keys, 3)
            assert (reply.created, reply.dropped, reply.missing) == (16, 0, 0)
            assert await read_chain(nodes["b"], keys) == WANTED
            assert await read_chain(nodes["c"], keys) == WANTED
            with pytest.raises(InvalidRequest):
                await asks.change(keys, 0)


@pytest.mark.slow  # processes start, and one dies while it copies
@pytest.mark.parametrize("victim", ["directory", "source", "target"])
async def test_a_death_in_the_middle_of_a_copy_leaves_nothing_reserved(victim: str) -> None:
    port = free_port()
    with contextlib.ExitStack() as started:
        processes = {"directory": started.enter_context(running_directory(port=port))}
        processes["source"] = started.enter_context(running_store("source", port))
        processes["target"] = started.enter_context(running_store("target", port))
        async with asking(port) as asks:
            await asks.until_in_step("source", "target")
            nodes = await asks.nodes()
            keys = await put_chain(nodes["source"], range(1, 1001))
            await until_replicas(asks, keys, 1)
            change = asyncio.create_task(asks.change(keys, 2))

            async def begun() -> bool:
                return (await asks.nodes())["target"].num_objects > 0 or change.done()

            await answered(begun)
            processes[victim].kill()
            processes[victim].wait()
            await asyncio.wait({change})
            if change.exception() is None:
                assert change.result().created + change.result().failed == len(keys)
        for survivor in {"source", "target"} - {victim}:
            await until_nothing_is_reserved(nodes[survivor].endpoint.rpc_address)


async def until_nothing_is_reserved(rpc_address: str) -> None:
    async with connected(rpc_address) as (client, _, store):

        async def balanced() -> bool:
            stats = await client.stats(store)
            return not stats.reserved_bytes and not stats.leased_bytes

        await answered(balanced)
