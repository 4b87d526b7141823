"""Compares the cost of a preemption with and without a store: `python -m benchmarks.worker.preemption`.

A decode worker's `OffloadStore` puts blocks of a real pool into a store process on this host and reads them back; it
computes checksums, and both sides verify. In turns with that, the worker's engine computes the same tokens in chunks of
512. Figures are medians in milliseconds. Next to them are the worker's predictions: for the store before it has
measured one, for computing from its profile. Every put has new keys.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.shapes import DEMO_FOLDER, SMALL, prompt_tokens
from benchmarks.harness.generate import greedy_slice
from benchmarks.harness.measure import median, table, write_json
from benchmarks.worker.overlap_worker import TOKEN, store_process
from moonserve.decode_worker.block_verifier import BlockVerifier
from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.decisions.events import LoadBlocks, OffloadBlock, StoreBlocks
from moonserve.decode_worker.store_io import OffloadStore
from moonserve.engine.replica import Replica, load_replica
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.protocol.kv_blocks import block_keys, root_key
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import Segment, TransferEngine
from moonserve.worker.process import KvMemory
from moonserve.worker.store_speed import prior

CHUNK = 512
LENGTHS = (128, 512, 2048)
MODELS = {"demo": None, "110M": SMALL}


@dataclass
class OffloadingWorker:
    """One worker's pool and its store."""

    replica: Replica
    access: OffloadStore
    store: Endpoint
    num_moves: int = 0

    async def moved(self, num_tokens: int) -> tuple[float, float]:
        """Returns the seconds of a put and of the read of the same blocks."""
        self.num_moves += 1
        size = self.replica.config.block_size
        tokens = prompt_tokens(self.num_moves, num_tokens, 4096)
        keys = block_keys(root_key(self.replica.fingerprint), tokens, size)
        blocks = tuple(
            OffloadBlock(block=index, key=key, parent=keys[index - 1] if index else None, checksum=None)
            for index, key in enumerate(keys)
        )
        began_at = time.perf_counter()
        kept = await self.access.store(StoreBlocks(move_id=self.num_moves, store=self.store, blocks=blocks))
        put_at = time.perf_counter()
        places = tuple(range(len(keys), 2 * len(keys)))
        load = LoadBlocks(move_id=self.num_moves, store=self.store, keys=tuple(keys), blocks=places)
        loaded = await self.access.load(load)
        assert kept.is_complete, "the store did not take it"
        assert loaded.checksums == kept.checksums, "it did not come back"
        return put_at - began_at, time.perf_counter() - put_at

    def computed(self, num_tokens: int) -> float:
        """Returns the seconds of computing `num_tokens` in chunks."""
        engine, size = self.replica.thread.engine, self.replica.config.block_size
        tokens = prompt_tokens(0, num_tokens, 4096)
        table = list(range(-(-num_tokens // size)))
        began_at = time.perf_counter()
        for start in range(0, num_tokens, CHUNK):
            engine.execute([greedy_slice("again", tokens, start, min(start + CHUNK, num_tokens), table)])
        return time.perf_counter() - began_at

    def predicted(self, num_tokens: int) -> tuple[float, float]:
        """Returns the predicted seconds of a put and a read together, and of computing."""
        profile, _ = self.replica.step_costs
        layout = self.replica.plan.layout
        num_bytes = num_tokens // layout.block_size * layout.block_bytes
        speed = prior(self.store, self.store.host)
        return 2 * speed.seconds(num_bytes), profile.seconds(num_tokens, 0)


async def measure(name: str, rounds: int) -> list[list[str]]:
    """Returns one table row per length."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        transfer = stack.enter_context(TransferEngine(cluster_token=TOKEN))
        replica, segment = await load_replica(_config(name, Path(folder)), transfer.allocate, Lifecycle(None))
        stack.enter_context(closing(replica.thread))
        address = await stack.enter_async_context(store_process("shm,tcp", 512 << 20))
        channels = Channels(TOKEN)
        stack.push_async_callback(channels.close)
        client = BlockStores(channels, transfer)
        stack.push_async_callback(client.close)
        side = OffloadingWorker(replica, _access(client, replica, segment), await client.locate(address))
        return [await _row(side, name, length, rounds) for length in LENGTHS]


async def _row(side: OffloadingWorker, name: str, length: int, rounds: int) -> list[str]:
    puts, reads, again = [], [], []
    for round_number in range(rounds + 1):  # the first round warms up both
        put_s, read_s = await side.moved(length)
        again_s = side.computed(length)
        if round_number:
            puts.append(put_s)
            reads.append(read_s)
            again.append(again_s)
    figures = (median(puts), median(reads), median(again), *side.predicted(length))
    return [name, str(length), *(f"{seconds * 1e3:.1f}" for seconds in figures)]


def _access(client: BlockStores, replica: Replica, segment: Segment) -> OffloadStore:
    plan = replica.plan
    verifier = BlockVerifier(segment.buffer, plan.layout, plan.num_blocks)
    return OffloadStore(client, KvMemory(segment, plan.layout, plan.num_blocks), verifier)


def _config(name: str, folder: Path) -> DecodeConfig:
    shape = MODELS[name]
    path = DEMO_FOLDER
    if shape is not None:
        path = folder
        write_json(folder / "config.json", shape)
    return DecodeConfig(
        instance_id="keeping",
        cluster_token=TOKEN,
        model=str(path),
        load_format="auto" if shape is None else "dummy",
        kv_cache_memory=160 << 20,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args(argv)
    rows = [row for name in options.models for row in asyncio.run(measure(name, options.rounds))]
    headers = ("model", "tokens", "put", "read", "again", "store, predicted", "again, predicted")
    print(table(headers, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
