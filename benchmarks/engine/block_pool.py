"""Measures the workers' block pool under millions of requests: memory, blocks per second, and latency of a call.

    python -m benchmarks.engine.block_pool [--requests 1000 … 10000000] [--json FILE]

The given number of requests hold one or two blocks each, 1.6 on average, at the same time. Then randomly chosen
requests leave and as many arrive. Block tables belong to the caller, as in a worker; they are kept in an array, which
counts as memory. Rates are per second of processor time, percentiles of wall time. *Single*: one call per request; the
rate is of consecutive calls to `allocate`, the percentiles are of calls timed one by one, timing overhead included.
*Pool*: percentiles from the pool's own metric. *Batch*: one call for the blocks of 32 requests. *Churn*: `release` and
`allocate` alternate. A rate is the median of the rounds; a percentile covers all rounds. Resident memory is the growth
of the process from before the pool is created until all requests hold their blocks. The exit status is 1 if the last
size misses a bar.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.measure import median, table, write_json
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.pool_metrics import DurationHistogram
from moonserve.protocol.latency import percentile

BLOCKS_PER_REQUEST = 1.6
BATCH = 32
FILL_BATCH = 4096
CALLS = 50_000  # per round, in turns of at most as many calls as there are requests

MOST_BYTES = 2 * 2**30
LEAST_BLOCKS_PER_S = 1_000_000
MOST_P99_US = 20.0
"""Bars for ten million requests over sixteen million blocks."""

Row = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    rows = [measure(number, arguments.rounds) for number in arguments.requests]
    for title, columns in TABLES.items():
        print(f"\n{title}\n")
        print(table(columns, [[row[column] for column in columns] for row in rows]))
    verdicts = bars(rows[-1])
    print("\n" + "\n".join(verdicts))
    write_json(arguments.json, {"benchmark": "engine_block_pool", "rows": rows, "bars": verdicts})
    return int(any(verdict.startswith("MISSED") for verdict in verdicts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[10**power for power in range(3, 8)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/engine/block_pool.json"))
    return parser.parse_args()


TABLES = {
    "Memory and filling": (
        "requests",
        "blocks",
        "resident_mib",
        "bytes_per_request",
        "process_mib",
        "fill_blocks_per_s",
        "release_blocks_per_s",
    ),
    "Single calls and batches of 32": (
        "requests",
        "single_blocks_per_s",
        "single_calls_per_s",
        "single_p50_us",
        "single_p99_us",
        "single_p999_us",
        "pool_p50_us",
        "pool_p99_us",
        "batch_blocks_per_s",
        "batch_p50_us",
        "batch_p99_us",
    ),
    "Churn": ("requests", "churn_per_s", "churn_p50_us", "churn_p99_us", "churn_p999_us"),
}


def bars(row: Row) -> list[str]:
    """Returns a verdict line for each bar of the largest size."""

    def bar(what: str, value: float, met: bool) -> str:
        return f"{'met' if met else 'MISSED'}: {what}: {value:,.1f}"

    resident = row["resident_mib"]
    verdicts = [bar("resident MiB of metadata ≤ 2,048", resident, resident * 2**20 <= MOST_BYTES)]
    for kind in ("single", "batch"):
        rate, p99 = row[f"{kind}_blocks_per_s"], row[f"{kind}_p99_us"]
        verdicts.append(bar(f"{kind}: blocks/s ≥ 1,000,000", rate, rate >= LEAST_BLOCKS_PER_S))
        verdicts.append(bar(f"{kind}: p99 µs per call ≤ 20", p99, p99 <= MOST_P99_US))
    return verdicts


@dataclass(slots=True, eq=False)
class RequestTables:
    """Block tables of all current requests over one pool, indexed by place."""

    pool: BlockPool
    counts: npt.NDArray[np.uint8]  # 1 or 2; a new request at a place needs the same number
    tables: npt.NDArray[np.uint32]  # [place, 2]
    rng: np.random.Generator

    @classmethod
    def of(cls, number: int) -> RequestTables:
        """Creates `number` requests that hold no blocks yet."""
        rng = np.random.default_rng(number)
        counts = ((rng.random(number) < BLOCKS_PER_REQUEST - 1) + 1).astype(np.uint8)
        num_blocks = int(counts.sum())
        pool = BlockPool(num_blocks, on_added=lambda *_: None, on_removed=lambda _: None)
        return cls(pool, counts, np.zeros((number, 2), np.uint32), rng)

    def draw(self, number: int) -> npt.NDArray[np.intp]:
        """Returns `number` random places without repetition."""
        return self.rng.choice(len(self.counts), number, replace=False)

    def blocks_of(self, places: npt.NDArray[np.intp] | slice) -> list[int]:
        """Returns the blocks of the requests at these places, in order."""
        held: list[int] = self.tables[places][self._is_held(places)].tolist()
        return held

    def keep(self, places: npt.NDArray[np.intp] | slice, blocks: list[int]) -> None:
        """Assigns these blocks to the requests at these places, in order."""
        tables = self.tables[places]
        tables[self._is_held(places)] = blocks
        self.tables[places] = tables

    def _is_held(self, places: npt.NDArray[np.intp] | slice) -> npt.NDArray[np.bool_]:
        counts = self.counts[places]
        return np.stack((counts > 0, counts > 1), axis=1)

    def leave(self, places: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        """Releases the blocks of these requests; returns the number of blocks of each."""
        self.pool.release(self.blocks_of(places))
        return self.counts[places]

    def validate(self) -> None:
        self.pool.validate()
        held = self.blocks_of(slice(None))
        assert len(set(held)) == len(held) == self.pool.num_held, "a block has two holders"


def measure(number: int, rounds: int) -> Row:
    gc.collect()
    before = _resident_bytes()
    crowd = RequestTables.of(number)
    num_blocks = crowd.pool.num_blocks
    fills, released = [_fill(crowd)], list[float]()
    resident = _resident_bytes()
    for _ in range(rounds - 1):
        released.append(num_blocks / _release_all(crowd))
        fills.append(_fill(crowd))
    row: Row = {
        "requests": number,
        "blocks": num_blocks,
        "resident_mib": (resident - before) / 2**20,
        "bytes_per_request": (resident - before) / number,
        "process_mib": resident / 2**20,
        "fill_blocks_per_s": median(fills),
        "release_blocks_per_s": median(released) if released else 0.0,
    }
    crowd.pool.durations = DurationHistogram()  # filling allocates thousands per call
    row |= _calls("single", crowd, rounds, 1)
    counted = crowd.pool.durations
    row |= {f"pool_p{each}_us": counted.percentile_s(each) * 1e6 for each in (50, 99)}
    row |= _calls("batch", crowd, rounds, BATCH) | _churn(crowd, rounds)
    if number <= 10**6:
        crowd.validate()
    assert crowd.pool.num_held == num_blocks, "somebody did not get its blocks"
    return row


def _fill(crowd: RequestTables) -> float:
    """Allocates the blocks of all requests; returns blocks per second."""
    seconds = 0.0
    for start in range(0, len(crowd.counts), FILL_BATCH):
        places = slice(start, start + FILL_BATCH)
        count = int(crowd.counts[places].sum())
        begun = time.process_time()
        blocks = crowd.pool.allocate(count)
        seconds += time.process_time() - begun
        assert blocks is not None
        crowd.keep(places, blocks)
    return crowd.pool.num_blocks / seconds


def _release_all(crowd: RequestTables) -> float:
    """Releases the blocks of all requests; returns the seconds taken."""
    seconds = 0.0
    for start in range(0, len(crowd.counts), FILL_BATCH):
        blocks = crowd.blocks_of(slice(start, start + FILL_BATCH))
        seconds += _seconds(crowd.pool.release, blocks)
    return seconds


def _turns(crowd: RequestTables) -> list[int]:
    """Returns the number of requests that each turn of a round replaces."""
    most = min(CALLS, len(crowd.counts))
    return [most] * (CALLS // most)


def _calls(kind: str, crowd: RequestTables, rounds: int, batch: int) -> Row:
    """Measures calls that each allocate the blocks of `batch` requests."""
    rates, call_rates, durations = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        num_blocks, num_calls, seconds = 0, 0, 0.0
        for calls in _turns(crowd):
            for allocate in (_allocate_each, _allocate_timed):
                places = crowd.draw(calls // batch * batch)
                counts = crowd.leave(places).reshape(-1, batch).sum(axis=1).tolist()
                blocks, took_s = allocate(crowd.pool, counts, durations)
                crowd.keep(places, blocks)
                if allocate is _allocate_each:
                    seconds += took_s
                    num_blocks += len(blocks)
                    num_calls += len(counts)
        rates.append(num_blocks / seconds)
        call_rates.append(num_calls / seconds)
    return {
        f"{kind}_blocks_per_s": median(rates),
        f"{kind}_calls_per_s": median(call_rates),
        **_percentiles(kind, durations),
    }


def _allocate_each(pool: BlockPool, counts: list[int], durations: list[float]) -> tuple[list[int], float]:
    allocate, found = pool.allocate, list[int]()
    begun = time.process_time()
    for count in counts:
        found += allocate(count)  # type: ignore[arg-type]  # the same number was just released
    return found, time.process_time() - begun


def _allocate_timed(pool: BlockPool, counts: list[int], durations: list[float]) -> tuple[list[int], float]:
    """Appends the microseconds of each call to `durations`."""
    allocate, now, found = pool.allocate, time.perf_counter_ns, list[int]()
    for count in counts:
        begun = now()
        blocks = allocate(count)
        durations.append((now() - begun) / 1000)
        assert blocks is not None
        found += blocks
    return found, 0.0


def _churn(crowd: RequestTables, rounds: int) -> Row:
    """Measures pairs of `release` and `allocate` per second, and the microseconds of each `allocate`."""
    rates, durations = list[float](), list[float]()
    release, allocate, now = crowd.pool.release, crowd.pool.allocate, time.perf_counter_ns
    for _ in range(rounds):
        num_pairs, seconds = 0, 0.0
        for calls in _turns(crowd):
            places = crowd.draw(calls)
            counts = crowd.counts[places].tolist()
            leaving = [crowd.tables[place, :count].tolist() for place, count in zip(places, counts, strict=True)]
            coming, begun_turn = list[int](), time.process_time()
            for blocks, count in zip(leaving, counts, strict=True):
                release(blocks)
                begun = now()
                fresh = allocate(count)
                durations.append((now() - begun) / 1000)
                assert fresh is not None
                coming += fresh
            seconds += time.process_time() - begun_turn
            crowd.keep(places, coming)
            num_pairs += calls
        rates.append(num_pairs / seconds)
    return {"churn_per_s": median(rates), **_percentiles("churn", durations)}


def _percentiles(kind: str, durations_us: list[float]) -> Row:
    durations_us.sort()
    points = (("p50", 50), ("p99", 99), ("p999", 99.9))
    return {f"{kind}_{name}_us": percentile(durations_us, point) for name, point in points}


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    begun = time.process_time()
    function(*arguments)
    return time.process_time() - begun


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
