"""The page pool under very many requests: bytes per request, blocks per second, and how long a call takes.

    python -m benchmarks.engine.pages [--requests 1000 … 10000000] [--json FILE]

So many requests hold one or two blocks each, 1.6 on average, all at once; then some of them, drawn at random, go and as
many come. Everything is called as others call it, through `PagePool`. *Single*: one call per request; its rate is of
calls to `allocate` in a row, its percentiles of calls that are timed one by one, with what the timing itself costs.
*Batch*: one call for 32 requests. *Churn*: `free` and `allocate` in turns, by one thread and by two: single calls keep
the interpreter's lock, batches do without it and wait for each other's. Each rate is the median of the rounds, a
percentile is of all rounds. Resident memory is what the process grew by from before the pool was made until all
requests held their blocks; what the benchmark itself needs was there before. Exit status 1 when the last size misses a
bar.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import median, table, write_json
from engine.pages import PagePool, PoolConfig
from protocol.timeline import percentile

BLOCKS_PER_REQUEST = 1.6
BATCH = 32
FILL_BATCH = 4096
CALLS = 50_000  # of a round, in turns of at most as many as there are requests
MIX = 0x9E3779B97F4A7C15  # odd, so its multiples are as many handles, and they are spread like random ones

MOST_BYTES = 2 * 2**30
LEAST_BLOCKS_PER_S = 1_000_000
MOST_P99_US = 20.0
"""The bars, at ten million requests over sixteen million blocks."""

Row = dict[str, Any]
Handles = npt.NDArray[np.uint64]


def main() -> int:
    arguments = _arguments()
    rows = [measure(number, arguments.rounds) for number in arguments.requests]
    for title, columns in TABLES.items():
        print(f"\n{title}\n")
        print(table(columns, [[row[column] for column in columns] for row in rows]))
    verdicts = bars(rows[-1])
    print("\n" + "\n".join(verdicts))
    write_json(arguments.json, {"benchmark": "engine_pages", "rows": rows, "bars": verdicts})
    return int(any(verdict.startswith("MISSED") for verdict in verdicts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[10**power for power in range(3, 8)]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/engine/pages.json"))
    return parser.parse_args()


TABLES = {
    "Memory and filling": (
        "requests",
        "blocks",
        "resident_mib",
        "bytes_per_request",
        "process_mib",
        "fill_blocks_per_s",
        "free_blocks_per_s",
    ),
    "Single calls and batches of 32": (
        "requests",
        "single_blocks_per_s",
        "single_calls_per_s",
        "single_p50_us",
        "single_p99_us",
        "single_p999_us",
        "batch_blocks_per_s",
        "batch_p50_us",
        "batch_p99_us",
    ),
    "Churn by one thread and by two: single calls": (
        "requests",
        *(f"churn_{n}_{figure}" for n in (1, 2) for figure in ("per_s", "p99_us", "p999_us")),
    ),
    "Churn by one thread and by two: batches": (
        "requests",
        *(
            f"batches_{n}_{figure}"
            for n in (1, 2)
            for figure in ("blocks_per_s", "p50_us", "p99_us", "p999_us")
        ),
    ),
}


def bars(row: Row) -> list[str]:
    """What is asked of the largest size, and what came out."""

    def bar(what: str, value: float, met: bool) -> str:
        return f"{'met' if met else 'MISSED'}: {what}: {value:,.1f}"

    resident = row["resident_mib"]
    verdicts = [bar("resident MiB of metadata ≤ 2,048", resident, resident * 2**20 <= MOST_BYTES)]
    for kind in ("single", "batch"):
        rate, p99 = row[f"{kind}_blocks_per_s"], row[f"{kind}_p99_us"]
        verdicts.append(bar(f"{kind}: blocks/s ≥ 1,000,000", rate, rate >= LEAST_BLOCKS_PER_S))
        verdicts.append(bar(f"{kind}: p99 µs per call ≤ 20", p99, p99 <= MOST_P99_US))
    return verdicts


# -- who holds what

Exchange = tuple[Handles, Handles, npt.NDArray[np.uint32]]
"""Who goes; who comes instead; how many blocks each wants."""


@dataclass(slots=True, eq=False)
class Crowd:
    """The requests that are there, by place, and the next handles. A place's request goes and another takes it."""

    handles: Handles
    counts: npt.NDArray[np.uint32]  # blocks by place; whoever takes it wants as many
    came: int
    rng: np.random.Generator

    @classmethod
    def of(cls, number: int) -> Crowd:
        rng = np.random.default_rng(number)
        counts = (rng.random(number) < BLOCKS_PER_REQUEST - 1).astype(np.uint32) + 1
        return cls(_handles(0, number), counts.astype(np.uint32), number, rng)

    def replace(self, number: int, part: int = 0, parts: int = 1) -> Exchange:
        """Some at random, all of one of several parts."""
        own = len(self.handles) // parts
        places = self.rng.choice(own, number, replace=False) * parts + part
        leaving, coming = self.handles[places], _handles(self.came, number)
        self.handles[places] = coming
        self.came += number
        return leaving, coming, self.counts[places]

    def succession(
        self, number: int, part: int, parts: int
    ) -> tuple[list[int], list[int], list[int]]:
        """As `replace`, but one after the other, and so perhaps one of those who came."""
        own = len(self.handles) // parts
        places = (self.rng.integers(0, own, number) * parts + part).tolist()
        coming = _handles(self.came, number)
        self.came += number
        leaving = []
        for place, handle in zip(places, coming, strict=True):
            leaving.append(int(self.handles[place]))
            self.handles[place] = handle
        return leaving, coming.tolist(), self.counts[places].tolist()


def _handles(first: int, number: int) -> Handles:
    return np.arange(first, first + number, dtype=np.uint64) * np.uint64(MIX)


# -- one size


def measure(number: int, rounds: int) -> Row:
    crowd = Crowd.of(number)
    num_blocks = int(crowd.counts.sum())
    gc.collect()
    before = _resident_bytes()
    pool = PagePool(PoolConfig(num_blocks=num_blocks, max_requests=number))
    fills = [_fill(pool, crowd)]
    resident = _resident_bytes()
    freed: list[float] = []
    for _ in range(rounds - 1):
        freed.append(num_blocks / _seconds(pool.free_all, crowd.handles))
        fills.append(_fill(pool, crowd))
    row: Row = {
        "requests": number,
        "blocks": num_blocks,
        "resident_mib": (resident - before) / 2**20,
        "bytes_per_request": (resident - before) / number,
        "process_mib": resident / 2**20,
        "fill_blocks_per_s": median(fills),
        "free_blocks_per_s": median(freed) if freed else 0.0,
    }
    row |= _singles(pool, crowd, rounds) | _batches(pool, crowd, rounds)
    for threads in (1, 2):
        row |= _churn(pool, crowd, rounds, threads)
        row |= _batch_churn(pool, crowd, rounds, threads)
    pool.validate()
    assert pool.stats().requests == number, "somebody did not get its blocks"
    return row


def _fill(pool: PagePool, crowd: Crowd) -> float:
    """Blocks per second."""
    begun = time.perf_counter()
    for start in range(0, len(crowd.handles), FILL_BATCH):
        handles = crowd.handles[start : start + FILL_BATCH]
        _, done = pool.allocate_all(handles, crowd.counts[start : start + FILL_BATCH])
        assert done == len(handles)
    return int(crowd.counts.sum()) / (time.perf_counter() - begun)


def _turns(crowd: Crowd) -> list[int]:
    """How many requests each turn of a round replaces."""
    most = min(CALLS, len(crowd.handles))
    return [most] * (CALLS // most)


def _singles(pool: PagePool, crowd: Crowd, rounds: int) -> Row:
    rates, call_rates, durations = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        blocks, seconds = 0, 0.0
        for calls in _turns(crowd):
            coming, counts = _make_place(pool, crowd, calls)
            seconds += _seconds(_allocate_each, pool, coming.tolist(), counts.tolist())
            blocks += int(counts.sum())
            coming, counts = _make_place(pool, crowd, calls)
            durations += _allocate_timed(pool, coming.tolist(), counts.tolist())
        rates.append(blocks / seconds)
        call_rates.append(CALLS / seconds)
    return {
        "single_blocks_per_s": median(rates),
        "single_calls_per_s": median(call_rates),
        **_percentiles("single", durations),
    }


def _make_place(
    pool: PagePool, crowd: Crowd, number: int
) -> tuple[Handles, npt.NDArray[np.uint32]]:
    leaving, coming, counts = crowd.replace(number)
    pool.free_all(leaving)
    return coming, counts


def _allocate_each(pool: PagePool, handles: list[int], counts: list[int]) -> None:
    allocate = pool.allocate
    for handle, count in zip(handles, counts, strict=True):
        allocate(handle, count)


def _allocate_timed(pool: PagePool, handles: list[int], counts: list[int]) -> list[float]:
    """Microseconds of each call."""
    allocate, now, durations = pool.allocate, time.perf_counter_ns, []
    for handle, count in zip(handles, counts, strict=True):
        begun = now()
        allocate(handle, count)
        durations.append((now() - begun) / 1000)
    return durations


def _batches(pool: PagePool, crowd: Crowd, rounds: int) -> Row:
    rates, durations = list[float](), list[float]()
    for _ in range(rounds):
        blocks, round_s = 0, list[float]()
        for calls in _turns(crowd):
            coming, counts = _make_place(pool, crowd, calls // BATCH * BATCH)
            blocks += int(counts.sum())
            for start in range(0, len(coming), BATCH):
                batch = coming[start : start + BATCH], counts[start : start + BATCH]
                round_s.append(_seconds(pool.allocate_all, *batch))
        rates.append(blocks / sum(round_s))
        durations += [seconds * 1e6 for seconds in round_s]
    return {"batch_blocks_per_s": median(rates), **_percentiles("batch", durations)}


def _churn(pool: PagePool, crowd: Crowd, rounds: int, threads: int) -> Row:
    """Pairs of `free` and `allocate` per second, over all threads; microseconds of each `allocate`."""
    rates, durations = list[float](), list[float]()
    for _ in range(rounds):
        parts = [crowd.succession(CALLS // threads, part, threads) for part in range(threads)]
        tasks = [_churning(pool, *part, durations) for part in parts]
        rates.append(CALLS / _seconds(_together, tasks))
    found = _percentiles(f"churn_{threads}", durations)
    return {f"churn_{threads}_per_s": median(rates), **found}


def _churning(
    pool: PagePool,
    leaving: list[int],
    coming: list[int],
    counts: list[int],
    durations: list[float],
) -> Callable[[], None]:
    def churn() -> None:
        now, mine = time.perf_counter_ns, list[float]()
        for old, new, count in zip(leaving, coming, counts, strict=True):
            pool.free(old)
            begun = now()
            pool.allocate(new, count)
            mine.append((now() - begun) / 1000)
        durations.extend(mine)

    return churn


def _batch_churn(pool: PagePool, crowd: Crowd, rounds: int, threads: int) -> Row:
    """Blocks per second over all threads, with what giving them back takes; microseconds of each `allocate_all`."""
    rates, durations = list[float](), list[float]()
    most = min(CALLS, len(crowd.handles)) // threads // BATCH * BATCH
    for _ in range(rounds):
        turns = range(CALLS // most // threads)
        parts = [[crowd.replace(most, p, threads) for _ in turns] for p in range(threads)]
        tasks = [_batch_churning(pool, part, durations) for part in parts]
        blocks = sum(int(counts.sum()) for part in parts for _, _, counts in part)
        rates.append(blocks / _seconds(_together, tasks))
    found = _percentiles(f"batches_{threads}", durations)
    return {f"batches_{threads}_blocks_per_s": median(rates), **found}


def _batch_churning(
    pool: PagePool, turns: list[Exchange], durations: list[float]
) -> Callable[[], None]:
    def churn() -> None:
        for leaving, coming, counts in turns:
            for start in range(0, len(coming), BATCH):
                batch = slice(start, start + BATCH)
                pool.free_all(leaving[batch])
                seconds = _seconds(pool.allocate_all, coming[batch], counts[batch])
                durations.append(seconds * 1e6)

    return churn


def _together(tasks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _percentiles(kind: str, durations_us: list[float]) -> Row:
    durations_us.sort()
    points = (("p50", 50), ("p99", 99), ("p999", 99.9))
    return {f"{kind}_{name}_us": percentile(durations_us, point) for name, point in points}


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    begun = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begun


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
