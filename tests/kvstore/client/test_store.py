"""The methods of `KvStore` and `AsyncKvStore` over a real node, by shared memory and by TCP."""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from moonserve.kvstore.client import AsyncKvStore, KvStore, Pin, chain, connect
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.node import StoreNode
from moonserve.kvstore.client.node_access.objects import plain_key
from moonserve.kvstore.index_layout import IndexMoved
from moonserve.protocol.errors import ConfigError, InvalidRequest, NoWorker, Overloaded, PeerLost, Unauthenticated
from moonserve.protocol.request import CacheHints
from tests.kvstore.client.pools import BOTH, TCP, both_ways, fresh, own_node, store_of
from tests.kvstore.client.pools import DRAM as SMALL_DRAM
from tests.kvstore.node.nodes import TOKEN, Node, key
from tests.patience import begin_and_cancel

T = TypeVar("T")
BLOCK = 64 * 1024
DRAM = 4 * SMALL_DRAM


@pytest.fixture(scope="module")
def own_store() -> Iterator[KvStore]:
    """A client of a node that never evicts ahead of need. Tests may fill the node and must leave it empty."""
    with own_node("--evict-above", "1", "--evict-share", "0") as (_, store):
        yield store


class Either:
    """Wraps a `KvStore` or an `AsyncKvStore` so that every method can be awaited."""

    def __init__(self, store: KvStore | AsyncKvStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            return await result if isinstance(result, Awaitable) else result

        return call

    @contextlib.asynccontextmanager
    async def lease(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        if isinstance(self._store, KvStore):
            with self._store.lease(*args, **options) as lease:
                yield lease
        else:
            async with self._store.lease(*args, **options) as lease:
                yield lease


@pytest.fixture(params=[("threads", BOTH), ("threads", TCP), ("asyncio", BOTH)], ids=str)
async def store(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Either]:
    kind, transports = request.param
    plain = store_of(f"node://{node.rpc_address}", transports)
    if kind == "threads":
        with plain:
            yield Either(plain)
    else:
        async with AsyncKvStore(plain) as asynchronous:
            yield Either(asynchronous)


@pytest.mark.parametrize("length", [0, 1, 1000, 3 * 2**20])
async def test_a_value_of_any_size_comes_back(store: Either, length: int) -> None:
    name, value = fresh(), os.urandom(length)
    assert await store.get(name) is None
    assert not await store.exists(name)
    await store.put(name, value)
    assert await store.exists(name)
    assert await store.get(name) == value
    assert await store.get(name, verify=False) == value
    await store.put(name, value)
    assert await store.remove(name)
    assert not await store.remove(name)
    assert await store.get(name) is None
    assert not await store.exists(name)


@pytest.mark.parametrize("chained", [False, True])
async def test_a_batch_returns_values_in_order_with_none_for_missing_keys(store: Either, chained: bool) -> None:
    first = int.from_bytes(os.urandom(8), "little")
    keys = chain([key(first + n) for n in range(4)]) if chained else [fresh() for _ in range(4)]
    pairs = [(key, os.urandom(size)) for key, size in zip(keys, (10, 0, BLOCK, 1), strict=True)]
    await store.batch_put(pairs, pin=Pin.HARD)
    assert await store.pin([keys[0], fresh()], "none") == 1
    assert await store.pin([fresh()], "hard") == 0
    names = [name for name, _ in pairs]
    asked = [names[0], fresh(), *names[1:]]
    assert await store.batch_get(asked) == [pairs[0][1], None, *(value for _, value in pairs[1:])]
    assert await store.batch_exists(asked) == [True, False, True, True, True]
    assert await store.batch_get([]) == []
    assert await store.batch_remove(asked) == 4


@pytest.mark.parametrize("is_callers", [False, True])
async def test_registered_memory_is_stored_and_read_without_a_copy(store: Either, is_callers: bool) -> None:
    segment = await (store.register(bytearray(4 * BLOCK)) if is_callers else store.allocate(4 * BLOCK))
    segment.buffer[:BLOCK] = value = os.urandom(BLOCK)
    name = fresh()
    await store.put_from(name, segment, 0, BLOCK)
    assert await store.get_into(name, segment, BLOCK, BLOCK) == BLOCK
    assert await store.get_into(name, segment, 2 * BLOCK) == BLOCK
    assert bytes(segment.buffer[: 3 * BLOCK]) == value * 3
    names = [fresh(), fresh()]
    segment.buffer[BLOCK : 2 * BLOCK] = other = os.urandom(BLOCK)
    await store.batch_put_from(names, segment, [0, BLOCK], [BLOCK, BLOCK])
    assert await store.batch_get_into([names[1], fresh()], segment, [2 * BLOCK, 0]) == [BLOCK, None]
    assert bytes(segment.buffer[2 * BLOCK : 3 * BLOCK]) == other
    assert await store.get_into(fresh(), segment) is None
    with pytest.raises(InvalidRequest, match="65536 bytes, the room for it 65535"):
        await store.get_into(name, segment, 0, BLOCK - 1)
    with pytest.raises(InvalidRequest, match="not within a segment"):
        await store.get_into(name, segment, 4 * BLOCK - 1, 2)
    with pytest.raises(InvalidRequest, match="not within a segment"):
        await store.put_from(fresh(), segment, 1, 4 * BLOCK)
    await store.deregister(segment)


async def test_a_part_of_a_value_is_read(store: Either) -> None:
    name, value = fresh(), os.urandom(BLOCK)
    await store.put(name, value)
    assert await store.get_range(name, 100, 1000) == value[100:1100]
    assert await store.get_range(name, BLOCK, 0) == b""
    assert await store.get_range(fresh(), 0, 1) is None
    with pytest.raises(InvalidRequest, match="a value of 65536"):
        await store.get_range(name, BLOCK - 1, 2)


async def test_values_are_read_in_place_under_a_lease(store: Either, node: Node) -> None:
    pairs = [(fresh(), os.urandom(size)) for size in (BLOCK, 0, 100)]
    await store.batch_put(pairs)
    asked = [pairs[0][0], fresh(), pairs[1][0], pairs[2][0]]
    async with store.lease(asked) as lease:
        views = lease.views
        found = [None if view is None else bytes(view) for view in views]
        assert found == [pairs[0][1], None, pairs[1][1], pairs[2][1]]
        assert all(view is None or view.readonly for view in views)
        assert await store.remove(pairs[0][0])
        assert await store.get(pairs[0][0]) is None
        await store.put(pairs[0][0], b"another")
        assert bytes(views[0]) == pairs[0][1]
        lease.check()
        assert (await store.stats()).total.leased_bytes > 0
    with pytest.raises(ValueError, match="released"):
        bytes(views[0])
    assert (await store.stats()).total.leased_bytes == 0


async def test_another_value_under_a_key_is_refused_until_the_first_is_removed(store: Either) -> None:
    name = fresh()
    await store.put(name, b"one")
    with pytest.raises(InvalidRequest, match="another value"):
        await store.put(name, b"two")
    assert await store.get(name) == b"one"
    await store.remove(name)
    await store.put(name, b"two")
    assert await store.get(name) == b"two"


async def test_writers_of_one_key_at_once_all_succeed_and_one_stores(store: Either, node: Node) -> None:
    name, value = fresh(), os.urandom(2**20)
    before = (await store.stats()).counters

    def put() -> None:
        with store_of(f"node://{node.rpc_address}") as other:
            other.put(name, value)

    await asyncio.gather(*(asyncio.to_thread(put) for _ in range(4)), store.put(name, value))
    assert await store.get(name) == value
    after = (await store.stats()).counters
    [(node_id, counts)] = after.items()
    assert counts["objects_stored"] == before[node_id]["objects_stored"] + 1


async def test_wrong_arguments_are_refused_before_anything_is_asked(store: Either) -> None:
    too_long = bytes(65537)
    for call, said in (
        *((named(too_long), "65536") for named in (store.get, store.exists, store.remove)),
        (store.put(too_long, b""), "65536"),
        (store.pin([fresh()], "firm"), "not a kind of pin"),
        (store.batch_get([fresh()], timeout_s=0.0), "timeout_s"),
        (store.put(fresh(), 17), "contiguous bytes"),
        *((store.put(fresh(), b"v", tenant=tenant), "tenant") for tenant in ("x" * 1025, "x" * 70_000, "\udc80")),
    ):
        with pytest.raises(InvalidRequest, match=said):
            await call
    for ttl_s in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match="ttl_s"):
            async with store.lease([fresh()], ttl_s=ttl_s):
                pass
    with pytest.raises(NoWorker, match="no directory"):
        await store.change_replica([fresh()], 2)
    await store.put(bytes(65536), b"the longest key")
    assert await store.get(bytes(65536)) == b"the longest key"


def test_a_value_larger_than_the_node_is_refused_with_both_sizes(own_store: KvStore) -> None:
    with pytest.raises(InvalidRequest, match=f"{SMALL_DRAM + 1} bytes .* {SMALL_DRAM} bytes"):
        own_store.put(b"large", bytes(SMALL_DRAM + 1))
    own_store.put(b"exact", bytes(SMALL_DRAM))
    assert own_store.get(b"exact") == bytes(SMALL_DRAM)
    assert own_store.remove(b"exact")


def test_a_store_full_of_leased_objects_says_so(own_store: KvStore) -> None:
    names = [b"%d" % number for number in range(SMALL_DRAM // 2**20)]
    own_store.batch_put((name, bytes(2**20)) for name in names)
    with own_store.lease(names), pytest.raises(Overloaded) as refused:
        own_store.put(b"one more", b"x")
    assert refused.value.retry_after_s
    own_store.put(b"one more", b"x")
    own_store.batch_remove([*names, b"one more"])


def test_a_tenant_over_its_quota_loses_its_own_and_is_told_what_does_not_fit() -> None:
    with own_node("--tenant-quota", "alice=1MiB") as (_, store):
        store.put(b"of nobody", b"value")
        for number in range(16):
            store.put(b"of alice %d" % number, bytes(2**17), tenant="alice")
        held = store.batch_exists([b"of alice %d" % number for number in range(16)])
        assert held == [False] * 8 + [True] * 8
        assert store.get(b"of nobody") == b"value"
        with pytest.raises(Overloaded, match="'alice' has a quota"):
            store.put(b"too large", bytes(2**21), tenant="alice")
        assert store.get(b"of alice 15") == bytes(2**17)


def test_readers_follow_an_index_that_grows() -> None:
    with own_node() as (node, writer), contextlib.ExitStack() as stores:
        readers = [stores.enter_context(store_of(f"node://{node.rpc_address}", way)) for way in (BOTH, TCP)]
        assert [reader.get(b"0") for reader in readers] == [None, None]
        for first in range(0, 1000, 100):
            writer.batch_put((b"%d" % n, b"v%d" % n) for n in range(first, first + 100))
            assert [reader.get(b"%d" % first) for reader in readers] == [b"v%d" % first] * 2
        names = [b"%d" % number for number in range(1000)]
        for reader in readers:
            assert reader.batch_get(names) == [b"v%d" % number for number in range(1000)]
            assert all(reader.batch_exists(names))
        writer.remove(b"17")
        assert [reader.get(b"17") for reader in readers] == [None, None]
        assert [reader.exists(b"17") for reader in readers] == [False, False]


def test_use_is_reported_when_a_client_closes_at_the_latest(own_store: KvStore) -> None:
    """Closing a client reports its reads: the oldest object, which it has read, is not evicted."""
    names = [b"%d" % number for number in range(SMALL_DRAM // 2**20)]
    for name in names:
        own_store.put(name, bytes(2**20))
    [node] = own_store.nodes()
    with store_of(f"node://{node.address}") as reader:
        assert reader.get(names[0]) is not None
    own_store.put(b"one more", bytes(2**20))
    assert own_store.batch_exists(names[:2]) == [True, False]
    own_store.batch_remove([*names, b"one more"])


def test_a_wrong_token_or_address_gives_a_clear_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONSERVE_CLUSTER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="MOONSERVE_CLUSTER_TOKEN"):
        connect("node://127.0.0.1:1")
    with pytest.raises(ConfigError, match="node://host:port"):
        connect("node://somewhere", cluster_token=TOKEN)
    with pytest.raises(ConfigError, match="scheme"):
        connect("http://127.0.0.1:1", cluster_token=TOKEN)
    with connect(f"node://{node.rpc_address}", cluster_token="wrong") as store, pytest.raises(Unauthenticated):
        store.get(b"key")
    with connect("node://127.0.0.1:1", cluster_token=TOKEN) as store, pytest.raises(PeerLost):
        store.get(b"key", timeout_s=2.0)
    with pytest.raises(PeerLost, match="registry"):
        connect("127.0.0.1:1", cluster_token=TOKEN, timeout_s=0.3)


@pytest.mark.parametrize(
    "begin",
    [lambda store: store.put(fresh(), bytes(2**20)), lambda store: store.lease([b"leased"]).__aenter__()],
    ids=["put", "lease"],
)
async def test_a_cancelled_call_ends_and_leaves_nothing_behind(
    node: Node, begin: Callable[[AsyncKvStore], Coroutine[Any, Any, object]]
) -> None:
    async with AsyncKvStore(store_of(f"node://{node.rpc_address}")) as store:
        await store.put(b"leased", b"value")
        await begin_and_cancel(begin(store))
        total = (await store.stats()).total
        assert total.reserved_bytes == total.leased_bytes == 0


def test_a_client_that_attaches_during_an_index_move_tries_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    open_, moves = StoreNode._open, [IndexMoved()]

    def opened(*args: Any) -> Any:
        if moves:
            raise moves.pop()
        return open_(*args)

    monkeypatch.setattr(StoreNode, "_open", opened)
    with store_of(f"node://{node.rpc_address}") as store:
        assert store.get(fresh()) is None
    assert not moves


@pytest.mark.parametrize("transports", [BOTH, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("num_keys", [3, 40], ids=["inline", "leased"])
def test_values_are_gathered_from_pieces_and_scattered_into_others(
    node: Node, transports: tuple[str, ...], num_keys: int
) -> None:
    sizes = [100_000, 28, 50_000]  # 40 values do not fit into one inline answer
    with store_of(f"node://{node.rpc_address}", transports) as store:
        memory = store.allocate((2 * num_keys + 1) * sum(sizes))
        memory.buffer[:] = os.urandom(memory.nbytes)
        rows = np.arange(num_keys).reshape(-1, 1)
        begins = np.cumsum([0, *sizes[:-1]]) * (2 * num_keys + 1) + rows * sizes
        source, target = begins, begins + num_keys * np.array(sizes)
        keys = chain([plain_key(fresh()) for _ in range(num_keys)])
        store.batch_put_gathered(keys, BufferSlots.pages(memory, source, sizes))
        store.batch_put_gathered(keys[:1], BufferSlots.pages(memory, target[:1], sizes))  # it keeps its first value
        missing = fresh()
        wanted = BufferSlots.pages(memory, np.concatenate((target, target[-1:] + np.array(sizes))), sizes)
        assert store.batch_get_scattered([*keys, missing], wanted) == [True] * num_keys + [False]
        there = BufferSlots.pages(memory, source, sizes)
        for place in range(num_keys):
            assert wanted.pieces(place) == there.pieces(place)
        with pytest.raises(InvalidRequest, match="bytes of a block"):
            store.batch_get_scattered(keys[:1], BufferSlots.pages(memory, source[:1, :1], sizes[:1]))


@both_ways
def test_hints_come_with_gathered_values(transports: tuple[str, ...]) -> None:
    with own_node("--evict-above", "1", "--evict-share", "0", transports=transports) as (_, store):
        slots = BufferSlots.pages(store.allocate(BLOCK), np.zeros((1, 1)), [BLOCK])
        older, low = fresh(), fresh()
        store.batch_put_gathered([older], slots)
        store.batch_put_gathered([low], slots, hints=CacheHints(low_priority=True))
        while store.exists(low):
            store.batch_put_gathered([fresh()], slots)
        assert store.exists(older)
