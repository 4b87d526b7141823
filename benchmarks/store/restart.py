"""Part 3: restarts a node with a full disk; measures the time to the first hit and counts the values that remain.

The node has little memory, so nearly all values are only on disk. Seconds count from the start of the process.
"""

import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.store import servers
from benchmarks.store.hit_ratio import Prompt, prompts_of
from benchmarks.store.report import Bar, restart_bars
from benchmarks.store.servers import TOKEN, ChildProcess, ProcessGroup, all_cores, start_node, wait_ready
from benchmarks.store.speed import moonserve
from benchmarks.store.speed.moonserve import RETRY_TIMEOUT_S, NumberedValues, with_retries
from benchmarks.transfer.contest import ContestantError
from benchmarks.transfer.workload import MIB
from moonserve.kvstore.client import Block, KvStore, chain, connect
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.traces.format import read_trace

# Replays a conversation trace against a store. The first part of the trace fills the store. Then the hits of the whole
# trace are counted, without changing the store.

TRACE_VALUE_BYTES = 4_096
"""Small stand-in for the much larger blocks of a trace: only their presence counts."""
FILLING_SHARE = 0.5
SYNTHETIC_PROMPTS = 2_000


def read_prompts(trace: Path | None, limit: int) -> tuple[str, list[Prompt]]:
    """Returns a name and the first prompts of the trace, or of a synthetic one if there is none."""
    if trace is not None and trace.exists():
        return f"{trace.name}, {limit:,} requests", prompts_of(read_trace(trace, limit))
    made_up = synthetic_prompts(min(limit, SYNTHETIC_PROMPTS))
    return f"a made-up trace of {len(made_up):,} requests", made_up


def synthetic_prompts(count: int) -> list[Prompt]:
    """Returns synthetic conversations: each request continues an earlier one or starts a new one."""
    rng = random.Random(1)
    numbers = itertools.count(1)
    made: list[Prompt] = []
    for _ in range(count):
        before = rng.choice(made).keys if made and rng.random() < 0.6 else ()
        new = itertools.islice(numbers, rng.randrange(1, 12))
        keys = (*before, *(BlockKey(number.to_bytes(KEY_BYTES, "little")) for number in new))
        made.append(Prompt(keys, 512 * len(keys)))
    return made


def put_prompts(store: KvStore, prompts: Sequence[Prompt]) -> None:
    """Puts the missing blocks of each prompt of the first half, behind the leading blocks that are present."""
    for prompt in prompts[: int(len(prompts) * FILLING_SHARE)]:
        blocks = chain(prompt.keys)
        missing = blocks[_num_leading(store, blocks) :]
        if missing:
            items = [(block, _value(block)) for block in missing]
            with_retries(partial(store.batch_put, items, timeout_s=RETRY_TIMEOUT_S))


def hit_rate(store: KvStore, prompts: Sequence[Prompt]) -> float:
    """Returns the share of all blocks that are hits: leading blocks of a prompt that are present."""
    hits = sum(_num_leading(store, chain(prompt.keys)) for prompt in prompts)
    return hits / sum(len(prompt.keys) for prompt in prompts)


def _num_leading(store: KvStore, blocks: Sequence[Block]) -> int:
    there = with_retries(partial(store.batch_exists, blocks, timeout_s=RETRY_TIMEOUT_S))
    return sum(1 for _ in itertools.takewhile(bool, there))


def _value(block: Block) -> bytes:
    return block.key * (TRACE_VALUE_BYTES // KEY_BYTES)


GIB = 1 << 30
VALUE_BYTES = MIB
MOST_GIB = 20.0
DRAM_BYTES = GIB
SPARE = 1.3
"""Disk space per byte of values. It leaves room for the log, so that compaction never starts."""
MORE_BYTES = 2 * GIB
"""Disk space for the trace's values."""
FLUSH_S = 300.0
RECOVERY_S = 300.0
POLL_S = 0.01
PROBES = 64
"""Number of evenly spread values, any of which may be the first hit."""
READ_AGAIN = 2_048
ASKED_AT_ONCE = 1_024

RestartFigures = dict[str, Any]


def default_gib(folder: Path) -> float:
    """Returns 20, or half of the free disk space if that is less."""
    return min(MOST_GIB, shutil.disk_usage(folder).free / 2 / GIB)


def measure(folder: Path, gib: float, named: tuple[str, Sequence[Prompt]]) -> tuple[RestartFigures, list[Bar]]:
    """Runs the part. `folder`: on the disk to use. `named`: a trace's name and its prompts."""
    num_values = max(1, int(gib * GIB) // VALUE_BYTES)
    trace, prompts = named
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-store-") as place:
        node = RestartableNode(Path(place), gib)
        try:
            put_gb_s, num_before, before = _filled(node, num_values, prompts)
            stop_s = node.stop()
            back = _restarted(node, num_values, prompts)
        finally:
            node.close()
    hits = {"trace": trace, "before": before, "at_once": back.pop("at_once")}
    part = {
        "gib": gib,
        "num_values": num_values,
        "num_before": num_before,
        "put_gb_s": put_gb_s,
        "stop_s": stop_s,
        "replay": hits | {"after": back.pop("after")},
        **back,
    }
    return part, restart_bars(part)


class RestartableNode:
    """A node whose disk outlives its processes."""

    def __init__(self, folder: Path, gib: float) -> None:
        self._group = ProcessGroup(folder)
        disk = folder / "disk"
        disk.mkdir()
        limit = int(gib * GIB * SPARE) + MORE_BYTES
        self._flags = ["--dram", str(DRAM_BYTES), "--ssd", f"{disk}:{limit}"]
        self._flags += ["--ssd-flush-s", str(FLUSH_S)]
        self._child: ChildProcess | None = None
        self.address = ""

    def start(self) -> KvStore:
        """Starts the node and returns as soon as it serves. Its index of the disk may still be incomplete."""
        self._child, reports = start_node(self._group, all_cores(), "restarted", *self._flags)
        self.address = wait_ready(self._child, reports)["rpc"]
        return connect(f"node://{self.address}", cluster_token=TOKEN, timeout_s=RETRY_TIMEOUT_S)

    def stop(self) -> float:
        assert self._child is not None
        return self._child.stop(FLUSH_S)

    def close(self) -> None:
        self._group.close()


def _filled(node: RestartableNode, num_values: int, prompts: Sequence[Prompt]) -> tuple[float, int, float]:
    """Fills the node. Returns the GB/s of puts, the number of values then present (a store may drop cold ones), and the
    trace's hit rate."""
    with node.start() as store:
        put_prompts(store, prompts)
        source = NumberedValues(store, VALUE_BYTES)
        begin = time.monotonic()
        for number in range(0, num_values, source.batch):
            source.put(range(number, min(num_values, number + source.batch)))
            _progress("put", number, num_values)
        spent = time.monotonic() - begin
        source.close()
        gb_s = num_values * VALUE_BYTES / spent / 1e9
        return gb_s, _num_found(store, num_values), hit_rate(store, prompts)


def _restarted(node: RestartableNode, num_values: int, prompts: Sequence[Prompt]) -> RestartFigures:
    begin = time.monotonic()
    with node.start() as store, ThreadPoolExecutor(1) as watcher:
        serving_s = time.monotonic() - begin
        recovered = watcher.submit(_until_recovered, node.address)
        _until_hit(store, num_values)
        first_hit_s = time.monotonic() - begin
        at_once = hit_rate(store, prompts)
        full_index_s = recovered.result() - begin
        return {
            "serving_s": serving_s,
            "first_hit_s": first_hit_s,
            "full_index_s": full_index_s,
            "at_once": at_once,
            "after": hit_rate(store, prompts),
            "num_found": _num_found(store, num_values),
            **_read_again(store, num_values),
        }


def _until_recovered(address: str) -> float:
    """Waits until the index is full; returns the time. Raises ContestantError on timeout."""
    give_up_at = time.monotonic() + RECOVERY_S
    while time.monotonic() < give_up_at:
        if servers.node_stats(address).recovered >= 1.0:
            return time.monotonic()
        time.sleep(POLL_S)
    raise ContestantError(f"the index is not full within {RECOVERY_S:g} s")


def _until_hit(store: KvStore, num_values: int) -> None:
    """Waits for the first hit. Raises ContestantError on timeout."""
    numbers = range(0, num_values, max(1, num_values // PROBES))
    give_up_at = time.monotonic() + RECOVERY_S
    while time.monotonic() < give_up_at:
        for number in numbers:
            get = partial(store.get, moonserve.key(number), timeout_s=RETRY_TIMEOUT_S)
            if with_retries(get) is not None:
                return
        time.sleep(POLL_S)
    raise ContestantError(f"no hit within {RECOVERY_S:g} s")


def _num_found(store: KvStore, num_values: int) -> int:
    keys = [moonserve.key(number) for number in range(num_values)]
    parts = (keys[at : at + ASKED_AT_ONCE] for at in range(0, num_values, ASKED_AT_ONCE))
    asked = (partial(store.batch_exists, part, timeout_s=RETRY_TIMEOUT_S) for part in parts)
    return sum(sum(with_retries(each)) for each in asked)


def _read_again(store: KvStore, num_values: int) -> dict[str, int]:
    """Reads a random sample of the values and compares every byte."""
    numbers = random.Random(1).sample(range(num_values), min(READ_AGAIN, num_values))
    target = NumberedValues(store, VALUE_BYTES)
    num_read = num_wrong = 0
    for at in range(0, len(numbers), target.batch):
        there, wrong = target.num_wrong(numbers[at : at + target.batch])
        num_read, num_wrong = num_read + there, num_wrong + wrong
    target.close()
    return {"num_read": num_read, "num_wrong": num_wrong}


def _progress(what: str, done: int, of: int) -> None:
    if done % ASKED_AT_ONCE == 0:
        print(f"· {what} {done:,} of {of:,} values", file=sys.stderr, flush=True)
