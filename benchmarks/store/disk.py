"""Compares the SSD tier with fio: the same disk, block size, depth and O_DIRECT, in turns.

Contestants are two tiers of a node, one with io_uring and one with threads, and fio with io_uring
(`--ioengine=io_uring --iodepth=DEPTH`) and with threads (`--ioengine=psync --numjobs=DEPTH --thread`, each thread in
its own part), always with `--direct=1 --time_based` on one preallocated file. Ratios are relative to the faster fio;
the bars are 0.85 for reads and 0.8 for writes. A tier verifies its reads, and its writes include headers and end marks.
All contestants overwrite blocks, as a node does that has run for a while; the tiers use the node's event loop, the
segment size for disks of 8 GiB and more, and blocks in a node's memory, which is in huge pages where the kernel has
them. So is fio's from 2 MiB on (GLIBC_TUNABLES). `depth` is the number of blocks in flight, divided among --calls
callers.

With --flushing the tier flushes after every group, and fio calls fdatasync every `depth` blocks; otherwise the tier
flushes once a second, and fio never.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from xxhash import xxh3_64_intdigest

from benchmarks.harness.measure import median, table, write_json
from moonserve.kvstore.disk.base import DiskObject, DiskRead, DiskWrite, Health, Place
from moonserve.kvstore.disk.tier import DiskOptions, SsdTier
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.transfer.memory.memfd import OwnedMemory

BARS = {"read": 0.85, "write": 0.8}
SIZES = (64 * 2**10, 2**20)
DEPTHS = (1, 8, 32)
FIO_RUNTIME_MS = 500
SEGMENT_BYTES = 256 * 2**20
NUM_SEGMENTS = 6
"""Number of segments of each tier. Blocks are released before others are written, so that no compaction runs."""
OPERATIONS = ("write", "randwrite", "read", "randread")  # fio's names


@dataclass(frozen=True, slots=True)
class Load:
    operation: str
    block_bytes: int
    depth: int


Measure = Callable[[Load], Awaitable[float]]
"""Bytes per second."""


class Disk:
    """A tier under test; writes and reads blocks of generated data."""

    def __init__(self, tier: SsdTier, memory: memoryview, total_bytes: int, calls: int) -> None:
        self._tier = tier
        self._memory = memory
        self._total_bytes = total_bytes
        self._calls = calls
        self._generation = 0

    async def measure(self, load: Load) -> float:
        """Runs the load. Returns bytes per second."""
        written = await self._write(load)
        took, reads = written[0], written[1]
        if "read" in load.operation:
            if load.operation == "randread":
                random.Random(0).shuffle(reads)
            took = await self._read(load, reads)
        for read in reads:
            self._tier.release(read.place)
        num_blocks = len(reads) // load.depth * load.depth
        return num_blocks * load.block_bytes / took

    async def _write(self, load: Load) -> tuple[float, list[DiskRead]]:
        shares = self._shares(load)
        nbytes = self._total_bytes // len(shares)
        prepared = [self._batches(load, share, nbytes) for share in shares]
        begin = time.perf_counter()
        placed = await asyncio.gather(*map(self._write_share, prepared))
        took = time.perf_counter() - begin
        return took, [
            DiskRead(object=write.object, place=_certain(place), memory=write.memory)
            for batches, answers in zip(prepared, placed, strict=True)
            for batch, places in zip(batches, answers, strict=True)
            for write, place in zip(batch, places, strict=True)
        ]

    def _batches(self, load: Load, slots: slice, nbytes: int) -> list[list[DiskWrite]]:
        """Returns the batches that one caller writes. They are prepared before timing, as a node has them anyway."""
        memories = self._memories(load, 0)[slots]
        checksums = [xxh3_64_intdigest(memory) for memory in memories]
        return [
            [
                DiskWrite(object=self._about(memory, checksum), memory=memory)
                for memory, checksum in zip(memories, checksums, strict=True)
            ]
            for _ in range(-(-nbytes // (len(memories) * load.block_bytes)))
        ]

    async def _write_share(self, batches: Sequence[Sequence[DiskWrite]]) -> list[list[Place | None]]:
        return [await self._tier.write(batch) for batch in batches]

    async def _read(self, load: Load, reads: Sequence[DiskRead]) -> float:
        """Reads into separate memory; each caller reads its share of the depth at once. Returns seconds."""
        into = self._memories(load, len(self._memory) // 2)
        aimed = [replace(read, memory=into[number % load.depth]) for number, read in enumerate(reads)]
        shares = self._shares(load)
        prepared = [
            [aimed[begin + share.start : begin + share.stop] for begin in self._turns(load, aimed)] for share in shares
        ]
        begin = time.perf_counter()
        await asyncio.gather(*map(self._read_share, prepared))
        return time.perf_counter() - begin

    def _turns(self, load: Load, reads: Sequence[DiskRead]) -> range:
        """Returns the first read of each batch of `depth` reads. An incomplete last batch is not read."""
        return range(0, len(reads) // load.depth * load.depth, load.depth)

    async def _read_share(self, batches: Sequence[Sequence[DiskRead]]) -> None:
        for batch in batches:
            assert all(await self._tier.read(batch)), "a block was not read"

    def _shares(self, load: Load) -> list[slice]:
        """Divides the depth among callers that do not wait for each other."""
        size = -(-load.depth // self._calls)
        return [slice(begin, begin + size) for begin in range(0, load.depth, size)]

    def _memories(self, load: Load, begin: int) -> list[memoryview]:
        size = load.block_bytes
        begins = range(begin, begin + size * load.depth, size)
        return [self._memory[each : each + size] for each in begins]

    def _about(self, memory: memoryview, checksum: int) -> DiskObject:
        self._generation += 1
        return DiskObject(
            key=BlockKey(self._generation.to_bytes(16, "little")),
            parent=None,
            length=len(memory),
            checksum=checksum,
            generation=self._generation,
        )


def _certain(place: Place | None) -> Place:
    assert place is not None, "the tier is full"
    return place


class Fio:
    """fio on one file, which is written completely before the first measurement."""

    def __init__(self, path: Path, total_bytes: int, *, flushing: bool) -> None:
        self._path = path
        self._total_bytes = total_bytes
        self._flushing = flushing
        self._run(Load("write", 2**20, 8), *self._ring(8))

    def through_io_uring(self, load: Load) -> float:
        """Runs the load with io_uring. Returns bytes per second."""
        return self._timed(load, *self._ring(load.depth))

    def by_threads(self, load: Load) -> float:
        """Runs the load with one thread per unit of depth. Returns bytes per second."""
        part = self._total_bytes // load.depth
        own_parts = f"--size={part}", f"--offset_increment={part}"
        jobs = "--ioengine=psync", f"--numjobs={load.depth}", "--thread", "--group_reporting"
        return self._timed(load, *jobs, *own_parts)

    def _ring(self, depth: int) -> tuple[str, ...]:
        return "--ioengine=io_uring", f"--iodepth={depth}", f"--size={self._total_bytes}"

    def _timed(self, load: Load, *how: str) -> float:
        flushes = self._flushing and "write" in load.operation
        flush = [f"--fdatasync={load.depth}"] if flushes else []
        return self._run(load, *how, "--time_based", f"--runtime={FIO_RUNTIME_MS}ms", *flush)

    def _run(self, load: Load, *how: str) -> float:
        command = [
            *("fio", "--name=bench", f"--filename={self._path}", "--direct=1"),
            *("--output-format=json", f"--rw={load.operation}", f"--bs={load.block_bytes}"),
            *how,
        ]
        huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | huge_pages)
        direction = "read" if "read" in load.operation else "write"
        speed: float = json.loads(result.stdout)["jobs"][0][direction]["bw_bytes"]
        return speed


def main() -> int:
    arguments = _arguments()
    if shutil.which("fio") is None:
        print("fio is not installed: nothing to compare with", file=sys.stderr)
        return 2
    folder = arguments.folder / "moonserve-store-disk"
    folder.mkdir()
    try:
        rows = uvloop.run(_measured(folder, arguments))
    finally:
        shutil.rmtree(folder)
    print(_report(rows))
    write_json(arguments.json, {"bars": BARS, "rounds": arguments.rounds, "rows": rows})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store.disk",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=128 * 2**20, help="moved per measurement")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk to measure")
    parser.add_argument("--threads", type=int, default=DiskOptions().num_threads)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--flushing", action="store_true", help="everything durable at once")
    parser.add_argument("--calls", type=int, default=4, help="callers that share the depth")
    parser.add_argument("--json", type=Path, default=Path("out/store-disk.json"))
    return parser.parse_args()


async def _measured(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    fio = Fio(folder / "fio", arguments.bytes, flushing=arguments.flushing)
    memory = OwnedMemory(32 * 2**20 * 2).view
    memory[:] = random.Random(0).randbytes(len(memory))
    options = DiskOptions(
        num_threads=arguments.threads,
        segment_bytes=SEGMENT_BYTES,
        sync_interval_s=0.0 if arguments.flushing else DiskOptions().sync_interval_s,
    )
    async with (
        _opened(folder / "ring", arguments, options, memory) as ring,
        _opened(folder / "threads", arguments, replace(options, ring=False), memory) as threads,
    ):
        contestants: dict[str, Measure] = {
            "ring": ring.measure,
            "threads": threads.measure,
            "fio_ring": lambda load: asyncio.to_thread(fio.through_io_uring, load),
            "fio_threads": lambda load: asyncio.to_thread(fio.by_threads, load),
        }
        for disk in (ring, threads):
            for _ in range(2 * NUM_SEGMENTS * SEGMENT_BYTES // arguments.bytes):
                await disk.measure(Load("write", 2**20, 8))  # until every segment is written
        loads = [Load(o, size, d) for o in arguments.operations for size in SIZES for d in DEPTHS]
        return await _rounds(contestants, loads, arguments.rounds)


@contextlib.asynccontextmanager
async def _opened(
    folder: Path, arguments: argparse.Namespace, options: DiskOptions, memory: memoryview
) -> AsyncIterator[Disk]:
    tier = await SsdTier.open(folder, NUM_SEGMENTS * SEGMENT_BYTES, options, _unmoved, _complain)
    async for _ in tier.recover(lambda share: None):
        pass
    try:
        yield Disk(tier, memory, arguments.bytes, arguments.calls)
    finally:
        await tier.close()


async def _rounds(contestants: Mapping[str, Measure], loads: Sequence[Load], rounds: int) -> list[dict[str, Any]]:
    speeds: dict[tuple[Load, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for load in loads:
            for name, measure in contestants.items():
                speeds[load, name].append(await measure(load))
        print(f"· round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [_row(load, {name: median(speeds[load, name]) / 1e9 for name in contestants}) for load in loads]


def _row(load: Load, gb_s: dict[str, float]) -> dict[str, Any]:
    best = max(gb_s["fio_ring"], gb_s["fio_threads"])
    bar = BARS["read" if "read" in load.operation else "write"]
    return {
        "operation": load.operation,
        "block_bytes": load.block_bytes,
        "depth": load.depth,
        "gb_s": gb_s,
        "ratio": gb_s["ring"] / best,
        "reached": gb_s["ring"] >= bar * best,
        "ratio_threads": gb_s["threads"] / best,
    }


def _report(rows: Sequence[dict[str, Any]]) -> str:
    names = ("ring", "threads", "fio_ring", "fio_threads")
    return table(
        (
            "GB/s",
            "block",
            "depth",
            "ring",
            "threads",
            "fio ring",
            "fio threads",
            "ratio",
            "threads",
        ),
        [
            [
                row["operation"],
                f"{row['block_bytes'] >> 10} KiB",
                row["depth"],
                *(f"{row['gb_s'][name]:.2f}" for name in names),
                f"{row['ratio']:.2f}{'' if row['reached'] else ' misses'}",
                f"{row['ratio_threads']:.2f}",
            ]
            for row in rows
        ],
    )


def _unmoved(about: DiskObject, source: Place, target: Place) -> bool:
    return False


def _complain(health: Health, reason: str) -> None:
    print(f"the disk is {health}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
