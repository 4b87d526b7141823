"""The directory over real nodes and real deaths: what it says is what the nodes hold."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from protocol.registry.remote import RemoteRegistry
from tests.kvstore.directory.cluster import (
    Questions,
    asking,
    put_chain,
    read_chain,
    running_directory,
    running_store,
    value,
)
from tests.kvstore.nodes import TOKEN, connected
from tests.patience import PATIENCE_S, answered
from tests.ports import free_port
from tests.stopping import stop

MEMORY = kvstore_pb2.STORE_TIER_MEMORY
DISK = kvstore_pb2.STORE_TIER_DISK


async def until_held(asks: Questions, keys: list[BlockKey], *names: str) -> None:
    """Each of the keys is on exactly these nodes."""

    async def as_wanted() -> bool:
        return all(set(holders) == set(names) for holders in await asks.holders(keys))

    await answered(as_wanted)


async def test_what_nodes_store_and_remove_is_known_within_moments() -> None:
    port = free_port()
    with running_directory(port=port), running_store("a", port), running_store("b", port):
        async with asking(port) as asks:
            await asks.until_in_step("a", "b")
            nodes = await asks.nodes()
            keys = await put_chain(nodes["a"], range(1, 9))
            await put_chain(nodes["b"], range(1, 4))
            await until_held(asks, keys[:3], "a", "b")
            await until_held(asks, keys[3:], "a")
            assert await asks.prefixes(keys) == {"a": (8, 8), "b": (3, 3)}
            assert (await asks.holders(keys))[0] == {"a": MEMORY, "b": MEMORY}
            async with connected(nodes["a"].endpoint.rpc_address) as (client, _, store):
                await client.remove(store, keys[7:])
            await until_held(asks, keys[7:])
            assert (await asks.nodes())["a"].num_objects == 7


async def test_it_is_a_member_that_says_where_it_can_be_asked_quickly_and_what_it_counts() -> None:
    port, metrics_port = free_port(), free_port()
    with (
        running_directory("--metrics-port", str(metrics_port), port=port),
        running_store("a", port),
    ):
        registry = RemoteRegistry(f"127.0.0.1:{port}", TOKEN)
        members = {member.role: member for member in await registry.members()}
        await registry.close()
        assert members["directory"].instance_id == "directory-0"
        async with asking(port, members["directory"].facts["lean"]) as asks:
            await asks.until_in_step("a")
            keys = await put_chain((await asks.nodes())["a"], range(1, 4))
            await until_held(asks, keys, "a")
            assert await asks.prefixes(keys) == {"a": (3, 3)}
        shown = await asyncio.to_thread(scraped, metrics_port)
        assert "moonserve_directory_keys 3.0" in shown
        assert "moonserve_directory_nodes_in_step 1.0" in shown
        assert "moonserve_directory_gaps_total 0.0" in shown


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as reply:
        text: str = reply.read().decode()
        return text


@pytest.mark.slow  # a node that was killed is believed in until its lease has ended, and a little longer: 16 s
async def test_a_killed_node_is_dropped_and_announces_its_disk_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    port = free_port()
    ssd = ("--ssd", f"{tmp_path}:64MiB", "--ssd-write-through")
    with running_directory(port=port), running_store("a", port):
        async with asking(port) as asks:
            with running_store("b", port, *ssd) as process:
                await asks.until_in_step("a", "b")
                nodes = await asks.nodes()
                keys = await put_chain(nodes["b"], range(1, 9))
                await put_chain(nodes["a"], range(1, 3))
                await until_held(asks, keys[2:], "b")
                async with connected(nodes["b"].endpoint.rpc_address) as (client, _, store):

                    async def on_disk() -> bool:
                        return (await client.stats(store)).disk_live_bytes >= 8 * 4096

                    await answered(on_disk)
                process.kill()
                process.wait()
            await until_held(asks, keys[:2], "a")
            await until_held(asks, keys[2:])
            assert set(await asks.nodes()) == {"a"}
            with running_store("b", port, *ssd):
                await until_held(asks, keys[2:], "b")
                assert (await asks.holders(keys))[7] == {"b": DISK}
                again = (await asks.nodes())["b"]
                assert await read_chain(again, keys) == b"".join(map(value, range(1, 9)))
                await until_tier(asks, keys[7], {"b": MEMORY})


async def until_tier(asks: Questions, key: BlockKey, tiers: dict[str, int]) -> None:
    async def as_wanted() -> bool:
        return (await asks.holders([key]))[0] == tiers

    await answered(as_wanted)


@pytest.mark.slow  # nodes learn at their next renewal, up to 3 s later, that the registry was lost with the directory
async def test_a_killed_directory_is_rebuilt_equal_from_what_the_nodes_hold() -> None:
    port = free_port()
    with running_store("a", port), running_store("b", port):
        with running_directory(port=port) as process:
            async with asking(port) as asks:
                await asks.until_in_step("a", "b")
                nodes = await asks.nodes()
                keys = await put_chain(nodes["a"], range(1, 20))
                await put_chain(nodes["b"], range(1, 6))
                await until_held(asks, keys[:5], "a", "b")
                before = await asks.holders(keys)
            process.kill()
            process.wait()
        await put_chain(nodes["b"], range(100, 105))  # the data plane goes on
        with running_directory(port=port):
            async with asking(port) as asks:
                await asks.until_in_step("a", "b")
                assert await asks.holders(keys) == before
                assert (await asks.nodes())["b"].num_objects == 10


@pytest.mark.slow  # a stopped node is out of step only when it has been silent for 5 s
async def test_a_stopped_node_keeps_its_place_and_is_in_step_again_when_it_wakes() -> None:
    port = free_port()
    with running_directory(port=port), running_store("a", port) as process:
        async with asking(port) as asks:
            await asks.until_in_step("a")
            keys = await put_chain((await asks.nodes())["a"], range(1, 5))
            await until_held(asks, keys, "a")
            stop(process.pid)
            try:

                async def silent() -> bool:
                    return not (await asks.nodes())["a"].in_step

                await answered(silent)
                await until_held(asks, keys, "a")
            finally:
                os.kill(process.pid, signal.SIGCONT)
            await asks.until_in_step("a")
            more = await put_chain((await asks.nodes())["a"], range(10, 12))
            await until_held(asks, [*keys, *more], "a")
