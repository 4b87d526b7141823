"""The SSD tier beside fio: the same disk, block size, depth and O_DIRECT, in turns.

Two tiers: one as a node has it, which flushes once a second, and one that flushes after every group. The first is
compared with fio that flushes nothing, the second with fio that calls fdatasync every `depth` blocks (fio --ioengine=
libaio --direct=1 --time_based, one file laid out before). What a tier reads is verified, what it writes has headers and
end marks besides. All write over blocks of the disk that were written before, as in a node that has run for a while;
the event loop is the node's too. `depth` is the number of blocks under way, shared by --calls callers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from xxhash import xxh3_64_intdigest

from benchmarks.measure import median, table, write_json
from kvstore.disk.base import DiskObject, DiskRead, DiskWrite, Health, Place
from kvstore.disk.tier import DiskOptions, SsdTier
from protocol.keys import BlockKey

BAR = 0.8
SIZES = (64 * 2**10, 2**20)
DEPTHS = (1, 8, 32)
FIO_RUNTIME_S = 1.0
FREE_SHARE = 4
"""The tier's capacity in multiples of what is written, so that no compaction runs."""


@dataclass(frozen=True, slots=True)
class Load:
    operation: str  # as fio calls it
    block_bytes: int
    depth: int


class Disk:
    """A tier and the blocks that were written to it."""

    def __init__(self, tier: SsdTier, total_bytes: int, calls: int) -> None:
        self._tier = tier
        self._total_bytes = total_bytes
        self._calls = calls
        self._generation = 0
        self._memory = memoryview(mmap.mmap(-1, 32 * 2**20 * 2))
        self._memory[:] = random.Random(0).randbytes(len(self._memory))

    async def measure(self, load: Load) -> float:
        """Bytes per second."""
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
        """What one caller writes. A node has such descriptions of its objects anyway; they are not the disk's work."""
        memories = self._memories(load, 0)[slots]
        checksums = [xxh3_64_intdigest(memory) for memory in memories]
        return [
            [
                DiskWrite(object=self._about(memory, checksum), memory=memory)
                for memory, checksum in zip(memories, checksums, strict=True)
            ]
            for _ in range(-(-nbytes // (len(memories) * load.block_bytes)))
        ]

    async def _write_share(
        self, batches: Sequence[Sequence[DiskWrite]]
    ) -> list[list[Place | None]]:
        return [await self._tier.write(batch) for batch in batches]

    async def _read(self, load: Load, reads: Sequence[DiskRead]) -> float:
        """Into memory of its own, each caller as many at once as are its part of the depth."""
        into = self._memories(load, len(self._memory) // 2)
        aimed = [
            replace(read, memory=into[number % load.depth]) for number, read in enumerate(reads)
        ]
        shares = self._shares(load)
        prepared = [
            [aimed[begin + share.start : begin + share.stop] for begin in self._turns(load, aimed)]
            for share in shares
        ]
        begin = time.perf_counter()
        await asyncio.gather(*map(self._read_share, prepared))
        return time.perf_counter() - begin

    def _turns(self, load: Load, reads: Sequence[DiskRead]) -> range:
        """Where each full depth begins; what is left at the end is not read."""
        return range(0, len(reads) // load.depth * load.depth, load.depth)

    async def _read_share(self, batches: Sequence[Sequence[DiskRead]]) -> None:
        for batch in batches:
            assert all(await self._tier.read(batch)), "a block was not read"

    def _shares(self, load: Load) -> list[slice]:
        """The depth, divided among callers that do not wait for each other."""
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
    """fio over one file, which is laid out before the first measurement."""

    def __init__(self, path: Path, total_bytes: int) -> None:
        self._path = path
        self._total_bytes = total_bytes
        self._run(Load("write", 2**20, 8), time_based=False)

    def measure(self, load: Load, *, durable: bool = False) -> float:
        """Bytes per second."""
        extra = [f"--fdatasync={load.depth}"] if durable else []
        return self._run(load, *extra)

    def _run(self, load: Load, *extra: str, time_based: bool = True) -> float:
        timed = ["--time_based", f"--runtime={FIO_RUNTIME_S}"] if time_based else []
        command = [
            *("fio", "--name=bench", f"--filename={self._path}", "--direct=1"),
            *("--ioengine=libaio", "--output-format=json", f"--size={self._total_bytes}"),
            *(f"--rw={load.operation}", f"--bs={load.block_bytes}", f"--iodepth={load.depth}"),
            *timed,
            *extra,
        ]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
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
    write_json(arguments.json, {"bar": BAR, "rounds": arguments.rounds, "rows": rows})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_disk",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=256 * 2**20, help="moved per measurement")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk to measure")
    parser.add_argument("--threads", type=int, default=DiskOptions().num_threads)
    parser.add_argument("--no-ring", action="store_true", help="everything through threads")
    parser.add_argument("--calls", type=int, default=4, help="callers that share the depth")
    parser.add_argument("--json", type=Path, default=Path("out/store-disk.json"))
    return parser.parse_args()


async def _measured(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    fio = Fio(folder / "fio", arguments.bytes)
    options = DiskOptions(
        num_threads=arguments.threads,
        segment_bytes=arguments.bytes // 2,
        ring=not arguments.no_ring,
    )
    async with (
        _opened(folder / "tier", arguments, options) as disk,
        _opened(folder / "flushing", arguments, replace(options, sync_interval_s=0.0)) as flushing,
    ):
        return await _rounds(disk, flushing, fio, arguments.rounds)


@contextlib.asynccontextmanager
async def _opened(
    folder: Path, arguments: argparse.Namespace, options: DiskOptions
) -> AsyncIterator[Disk]:
    tier = await SsdTier.open(folder, arguments.bytes * FREE_SHARE, options, _unmoved, _complain)
    async for _ in tier.recover(lambda share: None):
        pass
    try:
        yield Disk(tier, arguments.bytes, arguments.calls)
    finally:
        await tier.close()


async def _rounds(disk: Disk, flushing: Disk, fio: Fio, rounds: int) -> list[dict[str, Any]]:
    operations = ("write", "randwrite", "read", "randread")
    loads = [Load(each, size, d) for each in operations for size in SIZES for d in DEPTHS]
    speeds: dict[tuple[Load, str], list[float]] = defaultdict(list)
    for each in (disk, flushing):
        for _ in range(2 * FREE_SHARE):
            await each.measure(Load("write", 2**20, 8))  # every segment has been written once
    for number in range(rounds):
        for load in loads:
            speeds[load, "tier"].append(await disk.measure(load))
            speeds[load, "fio"].append(await asyncio.to_thread(fio.measure, load))
            if "write" in load.operation:
                speeds[load, "flushing"].append(await flushing.measure(load))
                durable = await asyncio.to_thread(partial(fio.measure, load, durable=True))
                speeds[load, "durable"].append(durable)
        print(f"· round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [_row(load, speeds) for load in loads]


def _row(load: Load, speeds: dict[tuple[Load, str], list[float]]) -> dict[str, Any]:
    gb_s = {
        who: median(speeds[load, who]) / 1e9
        for who in ("tier", "fio", "flushing", "durable")
        if speeds[load, who]
    }
    return {
        "operation": load.operation,
        "block_bytes": load.block_bytes,
        "depth": load.depth,
        "gb_s": gb_s,
        "ratio": gb_s["tier"] / gb_s["fio"],
        "ratio_durable": gb_s["flushing"] / gb_s["durable"] if "durable" in gb_s else None,
    }


def _report(rows: Sequence[dict[str, Any]]) -> str:
    return table(
        ("", "block", "depth", "tier GB/s", "fio GB/s", "ratio", "flushing", "fdatasync", "ratio"),
        [
            [
                row["operation"],
                f"{row['block_bytes'] >> 10} KiB",
                row["depth"],
                f"{row['gb_s']['tier']:.2f}",
                f"{row['gb_s']['fio']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['gb_s']['flushing']:.2f}" if "flushing" in row["gb_s"] else "",
                f"{row['gb_s']['durable']:.2f}" if "durable" in row["gb_s"] else "",
                f"{row['ratio_durable']:.2f}" if row["ratio_durable"] else "",
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
