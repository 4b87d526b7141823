"""drain: whatever only one node holds is on another then, byte for byte, or it is said what is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.kvctl.main import main
from deploy.terminal.endings import EXIT_INTERRUPTED
from kvstore.client.placement import home
from protocol.errors import Overloaded
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from protocol.wire import endpoint_to_wire
from tests.deploy.kvctl.stage import (
    ENVIRON,
    PATIENTLY,
    SEGMENT_BYTES,
    Kvctl,
    Stage,
    chain_keys,
    get_all,
    put,
    put_chain,
    stage,
)
from tests.kvstore.nodes import TOKEN, Node, connected
from tests.patience import PATIENCE_S, answered
from tests.processes import ROOT

pytestmark = pytest.mark.slow  # each test starts three or four processes of its own

VALUES = {f"value-{number}": os.urandom(10_000 + number) for number in range(100)}


def test_a_drained_node_can_be_stopped_without_loss(capsys: pytest.CaptureFixture[str]) -> None:
    with stage(["store-0", "store-1", "store-2"]) as made:
        put(made.nodes["store-0"], VALUES)
        kvctl = Kvctl(capsys, made.registry)
        said = kvctl("drain", "store-0")
        assert said.code == 0, said.err
        assert "store-0 holds nothing alone any more: it can be stopped" in said.lines
        made.nodes["store-0"].stop()
        weights = dict.fromkeys(("store-1", "store-2"), float(SEGMENT_BYTES))
        held = {r["key"]: r["node"] for r in kvctl.json("ls", "--limit", "0")}
        assert all(home(bytes.fromhex(k), weights) == node for k, node in held.items())  # type: ignore[arg-type]
        found = get_all(made.nodes["store-1"], VALUES) | get_all(made.nodes["store-2"], VALUES)
    assert found == VALUES


def test_draining_refuses_writes_until_it_is_undone(capsys: pytest.CaptureFixture[str]) -> None:
    with stage(["store-0", "store-1"]) as made:
        kvctl = Kvctl(capsys, made.registry)
        put(made.nodes["store-0"], {"before": b"value"})
        assert kvctl("drain", "store-0").code == 0
        assert kvctl.json("nodes")[0]["state"] == "draining"
        with pytest.raises(Overloaded):
            put(made.nodes["store-0"], {"during": b"value"})
        again = kvctl("drain", "store-0")
        assert again.code == 0
        assert "copied" not in again.out
        assert kvctl("drain", "store-0", "--undo").out == "store-0 accepts objects again\n"
        put(made.nodes["store-0"], {"after": b"value"})
        assert kvctl.json("nodes")[0]["state"] == "ok"


def test_a_chain_goes_where_its_beginning_is_and_keeps_its_pins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = chain_keys("drained", 150)
    with stage(["store-0", "store-1", "store-2"]) as made:
        put_chain(made.nodes["store-0"], keys)
        put_chain(made.nodes["store-2"], keys[:10])
        kvctl = Kvctl(capsys, made.registry)
        for kind, key in (("--hard", keys[3]), ("--soft", keys[100])):
            assert kvctl("pin", key.hex(), kind, "--node", "store-0").code == 0
        assert kvctl("drain", "store-0").code == 0
        found = {r["key"]: r for r in kvctl.json("ls", "--node", "store-2", "--limit", "0")}
        assert set(found) == {key.hex() for key in keys}
        assert found[keys[3].hex()]["pin"] == "hard"
        assert found[keys[100].hex()]["pin"] == "soft"
        parents = [found[key.hex()]["parent"] for key in keys]
        assert parents == [None, *(key.hex() for key in keys[:-1])]


def test_what_found_no_place_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with stage(["store-0"]) as made, made.joined("store-1", "--dram", "1MiB"):
        put(made.nodes["store-0"], {"large": bytes(3 * 2**20), "small": b"value"})
        kvctl = Kvctl(capsys, made.registry)
        said = kvctl("drain", "store-0")
        assert said.code == 1
        assert "not placed:" in said.out
        assert "1 object (3.0 MiB) found no place" in said.err
        assert "still draining" in said.err
        [record] = kvctl("--json", "drain", "store-0").records
        assert not record["can_be_stopped"]
        assert len(record["unplaced"]) == 1


def test_a_full_cluster_ends_a_drain_instead_of_chasing_its_own_evictions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stage(["store-0"]) as made, made.joined("store-1", "--dram", "1MiB"):
        put(made.nodes["store-0"], {f"cold-{n}": bytes(100_000) for n in range(40)})
        said = Kvctl(capsys, made.registry)("drain", "store-0")
    assert said.code == 1
    assert "they will evict what is cold there" in said.err


def test_what_is_only_on_disk_is_drained_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three times what memory holds; write-through, so that nothing is evicted before it is on disk."""
    values = {f"cold-{n}": os.urandom(8) * 25_000 for n in range(120)}
    ssd = ("--ssd", f"{tmp_path}:512MiB", "--ssd-write-through")
    with (
        stage([]) as made,
        made.joined("store-0", "--dram", str(SEGMENT_BYTES), *ssd) as leaving,
        made.joined("store-1", "--dram", "64MiB") as other,
    ):
        put_behind_the_disk(leaving, values)
        kvctl = Kvctl(capsys, made.registry)
        held = {record["key"] for record in kvctl.json("ls", "--limit", "0")}
        assert kvctl.json("ls", "--disk-only", "--limit", "0")
        [record] = kvctl.json("drain", "store-0")
        assert (record["copied"], record["gone"]) == (len(held), 0)
        found = get_all(other, values)
    assert len(found) == len(held)
    assert found.items() <= values.items()


def put_behind_the_disk(node: Node, values: dict[str, bytes]) -> None:
    """A node whose memory is full of what its disk does not have yet refuses for a moment."""

    async def body() -> None:
        async with connected(node.rpc_address) as (client, _, endpoint):

            async def taken(key: str) -> bool:
                try:
                    await client.put_bytes(endpoint, key.encode(), values[key])
                except Overloaded:
                    return False
                return True

            for key in values:
                await answered(partial(taken, key))

    asyncio.run(body())


def test_there_must_be_another_node(capsys: pytest.CaptureFixture[str]) -> None:
    with stage(["store-0"]) as made:
        kvctl = Kvctl(capsys, made.registry)
        said = kvctl("drain", "store-0")
        assert said.code == 1
        assert "no other node takes what store-0 holds" in said.err
        assert kvctl.json("nodes")[0]["state"] == "ok"


def test_an_interrupted_drain_says_what_it_leaves_and_can_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A writer that has not finished holds the drain up until the signal has come."""
    with stage(["store-0", "store-1"]) as made:
        put(made.nodes["store-0"], VALUES)
        kvctl = Kvctl(capsys, made.registry)
        with _unfinished_write(made.address("store-0")):
            command = _start_drain(made, "store-0")
            assert command.stderr is not None
            assert any("waiting for writes" in line for line in command.stderr)
            command.send_signal(signal.SIGINT)
            _, said = command.communicate(timeout=PATIENCE_S)
            assert command.returncode == EXIT_INTERRUPTED
            assert "interrupted: store-0 is still draining" in said
            assert kvctl.json("nodes")[0]["state"] == "draining"
        assert kvctl("drain", "store-0").code == 0
        assert get_all(made.nodes["store-1"], VALUES) == VALUES


@contextlib.contextmanager
def _unfinished_write(address: str) -> Iterator[None]:
    _ask(
        address,
        "Reserve",
        kvstore_pb2.StoreReserveRequest(
            reservation_id="unfinished", ttl_s=60.0, wishes=[{"key": b"k" * 16, "length": 1}]
        ),
    )
    try:
        yield
    finally:
        _ask(address, "Abort", kvstore_pb2.StoreAbortRequest(reservation_id="unfinished"))


def _ask(address: str, method: str, request: Any) -> None:
    async def body() -> None:
        channels = Channels(TOKEN)
        try:
            stub = kvstore_pb2_grpc.KvStoreStub(channels.to(address))
            await channels.call(getattr(stub, method), request, timeout_s=PATIENCE_S)
        finally:
            await channels.close()

    asyncio.run(body())


def _start_drain(made: Stage, name: str) -> subprocess.Popen[str]:
    command = [*PATIENTLY, "--registry", made.registry, "drain", name]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **ENVIRON}, stderr=subprocess.PIPE, text=True
    )


class _BusyStore(kvstore_pb2_grpc.KvStoreServicer):
    """A store node that is too busy for its first pin."""

    def __init__(self, name: str, pins: dict[bytes, int]) -> None:
        self.pins = pins
        self.address = ""
        self._name = name
        self._is_busy = True

    async def Describe(self, request: Any, context: Any) -> kvstore_pb2.StoreDescribeReply:
        endpoint = Endpoint(
            instance_id=self._name,
            epoch=1,
            rpc_address=self.address,
            transfer_address="",
            host="",
        )
        return kvstore_pb2.StoreDescribeReply(endpoint=endpoint_to_wire(endpoint))

    async def Stats(self, request: Any, context: Any) -> kvstore_pb2.StoreStatsReply:
        return kvstore_pb2.StoreStatsReply(capacity_bytes=1000, free_bytes=1000)

    async def SetDraining(self, request: Any, context: Any) -> kvstore_pb2.StoreSetDrainingReply:
        return kvstore_pb2.StoreSetDrainingReply()

    async def List(
        self, request: kvstore_pb2.StoreListRequest, context: Any
    ) -> AsyncIterator[kvstore_pb2.StoreListReply]:
        keys = [key for key in self.pins if request.key in (b"", key)]
        reply = kvstore_pb2.StoreListReply()
        for key in keys:
            reply.objects.add(key=key, length=1, pin=kvstore_pb2.StorePin.ValueType(self.pins[key]))
        yield reply

    async def Exists(
        self, request: kvstore_pb2.StoreExistsRequest, context: Any
    ) -> kvstore_pb2.StoreExistsReply:
        return kvstore_pb2.StoreExistsReply(present=[key in self.pins for key in request.keys])

    async def Copy(
        self, request: kvstore_pb2.StoreCopyRequest, context: Any
    ) -> kvstore_pb2.StoreCopyReply:
        self.pins |= dict.fromkeys(request.keys, kvstore_pb2.STORE_PIN_NONE)
        return kvstore_pb2.StoreCopyReply(copied=len(request.keys))

    async def Pin(
        self, request: kvstore_pb2.StorePinRequest, context: Any
    ) -> kvstore_pb2.StorePinReply:
        is_busy, self._is_busy = self._is_busy, False
        if is_busy:
            raise Overloaded("too many calls", retry_after_s=1.0)
        self.pins |= dict.fromkeys(request.keys, request.pin)
        return kvstore_pb2.StorePinReply(pinned=len(request.keys))


async def test_a_pin_that_fails_beside_a_copy_is_set_in_the_next_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = b"k" * 16
    pins: dict[str, dict[bytes, int]] = {
        "store-0": {key: kvstore_pb2.STORE_PIN_HARD},
        "store-1": {},
    }
    # Only what a drain asks is answered.
    stores = [_BusyStore(name, pins[name]) for name in pins]  # type: ignore[abstract]
    async with contextlib.AsyncExitStack() as stack:
        for store in stores:
            server = RpcServer(TOKEN)
            kvstore_pb2_grpc.add_KvStoreServicer_to_server(store, server.grpc)
            store.address = await server.start("127.0.0.1", 0)
            stack.push_async_callback(server.stop, 0.0)
        nodes = [part for store in stores for part in ("--node", store.address)]
        drain = ["--json", "drain", stores[0].address, *nodes]
        assert await asyncio.to_thread(main, drain, ENVIRON) == 0
    assert stores[1].pins == {key: kvstore_pb2.STORE_PIN_HARD}
    [record] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["copied"], record["gone"]) == (1, 0)
