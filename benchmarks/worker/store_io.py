"""Compares a worker's load and put of stored blocks with the public client's: `python -m benchmarks.worker.store_io`.

A store process on this host holds 32 blocks of 64 KiB. The worker reads them into its pool, each in many pieces
(`prefill_worker.store_io.load_prefix`), and puts other blocks; the public client reads and puts values in one piece
(`batch_get_into`, `batch_put_from`). Both verify the writers' checksums. Calls alternate. Figures are medians over the
rounds of each round's median call, and the median of the rounds' ratios.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from benchmarks.harness.measure import median, table
from benchmarks.worker.overlap_worker import TOKEN, store_process
from moonserve.kvstore.client import chain, connect
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.prefill_worker.decisions.events import LoadPrefix, PrefixLoaded, PrefixPart, PutBlocks, PutDone, PutItem
from moonserve.prefill_worker.decisions.load_or_compute import LoadChoice
from moonserve.prefill_worker.store_io import load_prefix, put_blocks
from moonserve.protocol.kv_blocks import BlockKey, KvLayout
from moonserve.protocol.request import RequestId
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import TransferEngine, TransferOptions
from moonserve.transfer.config import TransferTimeout
from moonserve.worker.process import KvMemory

NUM_BLOCKS = 32
LAYOUT = KvLayout(num_layers=8, block_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
POOL_BLOCKS = 103
"""Not a power of two: all pieces of a block would map to few sets of the caches."""
NUM_CALLS = 40
PATIENCE = TransferTimeout(base_s=30.0)
CHOICE = LoadChoice(num_parts=1, part_s=(), totals_s=())
Call = Callable[[], Awaitable[None]]


def keys_of(run: int) -> list[BlockKey]:
    return [BlockKey(f"{run:08d}{n:08d}".encode()) for n in range(NUM_BLOCKS)]


async def make_calls(stack: AsyncExitStack, transport: str) -> dict[str, tuple[Call, Call]]:
    """Returns the worker's and the public client's call, by operation."""
    address = await stack.enter_async_context(store_process("shm,tcp", 512 << 20))
    options = TransferOptions(transports=(transport,), checksums=False)
    transfer = stack.enter_context(TransferEngine(cluster_token=TOKEN, options=options))
    channels = Channels(TOKEN)
    stack.push_async_callback(channels.close)
    client = BlockStores(channels, transfer)
    stack.push_async_callback(client.close)
    store = await client.locate(address, timeout_s=30.0)
    public = stack.enter_context(connect(f"node://{address}", cluster_token=TOKEN, options=options, timeout_s=30.0))
    segment = transfer.allocate(LAYOUT.pool_bytes(POOL_BLOCKS))
    memory = KvMemory(segment, LAYOUT, POOL_BLOCKS)
    segment.buffer[:] = bytes(range(256)) * (segment.nbytes // 256)
    values = public.allocate(NUM_BLOCKS * LAYOUT.block_bytes)
    offsets = [n * LAYOUT.block_bytes for n in range(NUM_BLOCKS)]
    lengths = [LAYOUT.block_bytes] * NUM_BLOCKS
    blocks = tuple(range(NUM_BLOCKS))
    spots = memory.spots_of(blocks)
    sums = [spots.checksum(block) for block in blocks]
    num_puts = 0

    async def worker_puts() -> None:
        nonlocal num_puts
        num_puts += 1
        keys = keys_of(num_puts)
        items = tuple(
            PutItem(key=key, parent=keys[n - 1] if n else None, block=n, checksum=sums[n]) for n, key in enumerate(keys)
        )
        action = PutBlocks(put_id=num_puts, store=store, items=items)
        done = await put_blocks(client, memory, action, PATIENCE)
        assert isinstance(done, PutDone), done
        assert not done.num_refused, done

    async def public_puts() -> None:
        nonlocal num_puts
        num_puts += 1
        public.batch_put_from(chain(keys_of(num_puts)), values, offsets, lengths)

    await worker_puts()
    keys = keys_of(num_puts)
    part = PrefixPart(store=store, keys=tuple(keys), blocks=tuple(b + NUM_BLOCKS for b in blocks))
    action = LoadPrefix(request_id=RequestId("load"), parts=(part,), choice=CHOICE)

    async def worker_loads() -> None:
        loaded = await load_prefix(client, memory, action, PATIENCE)
        assert isinstance(loaded, PrefixLoaded), loaded
        assert list(loaded.checksums) == sums, "not all of it came"

    async def public_loads() -> None:
        assert public.batch_get_into(chain(keys), values, offsets, lengths) == lengths

    return {"load": (worker_loads, public_loads), "put": (worker_puts, public_puts)}


async def measure_round(pair: tuple[Call, Call]) -> tuple[float, float]:
    """Returns the median milliseconds of each call."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_CALLS):
        for call, times in zip(pair, seconds, strict=True):
            began_at = time.perf_counter()
            await call()
            times.append(time.perf_counter() - began_at)
            await asyncio.sleep(0)  # lets callbacks of a call run before the next call
    return median(seconds[0]) * 1e3, median(seconds[1]) * 1e3


async def measured(transport: str, num_rounds: int) -> list[list[str]]:
    rows = []
    async with AsyncExitStack() as stack:
        for name, pair in (await make_calls(stack, transport)).items():
            await measure_round(pair)  # warms both
            rounds = [await measure_round(pair) for _ in range(num_rounds)]
            worker, public = (median([each[side] for each in rounds]) for side in (0, 1))
            ratio = median([worker_ms / public_ms for worker_ms, public_ms in rounds])
            rows.append([transport, name, f"{worker:.2f}", f"{public:.2f}", f"{ratio:.2f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    rows = [row for transport in ("shm", "tcp") for row in asyncio.run(measured(transport, options.rounds))]
    print(table(("transport", "call", "worker, ms", "public client, ms", "ratio"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
