"""Part 5, nodes: measures one client of 1 … 64 nodes and a directory, all real processes on one machine.

Values are small, so that lookups and requests are measured rather than copies. All processes share the machine's cores:
with 64 nodes, their idle load affects the figures.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import median
from benchmarks.store import servers
from benchmarks.store.servers import TOKEN, ProcessGroup, all_cores, start_node, start_process, wait_ready
from benchmarks.store.speed.moonserve import RETRY_TIMEOUT_S, with_retries
from benchmarks.transfer.contest import ContestantError
from moonserve.kvstore.client import KvStore, connect
from moonserve.protocol.errors import MoonserveError

COUNTS, QUICK_COUNTS = (1, 4, 16, 64), (1, 4)
VALUE_BYTES = 4_096
DRAM_BYTES = 32 << 20
NUM_VALUES = 2_000
"""The same for every number of nodes; all fit into one node."""
SAMPLES = 5
CONNECT_TIMEOUT_S = 60.0
TOGETHER = 4
"""Nodes that start at the same time; more would delay each other."""
KNOWN_S = 60.0
POLL_S = 0.1

Point = dict[str, Any]


def measure(counts: Sequence[int]) -> list[Point]:
    return [_point(count) for count in counts]


def _point(count: int) -> Point:
    print(f"· {count} nodes", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        group = ProcessGroup(Path(folder))
        try:
            return {"nodes": count, **_measured(group, count)}
        except (ContestantError, MoonserveError) as error:
            return {"nodes": count, "failed": str(error)}
        finally:
            group.close()


def _measured(group: ProcessGroup, count: int) -> Point:
    child, reports = start_process(group, all_cores(), "directory", "directory")
    address = wait_ready(child, reports)["rpc"]
    _start_nodes(group, address, count)
    connects, first_gets = _cold(address, count)
    with connect(address, cluster_token=TOKEN, timeout_s=CONNECT_TIMEOUT_S) as store:
        _until_known(store, count)
        figures = _operations(store)
        view = _until_indexed(address)
    return {
        "connect_ms": median(connects) * 1e3,
        "first_get_ms": median(first_gets) * 1e3,
        **figures,
        "directory_bytes_per_key": view.memory_bytes / max(1, view.num_keys),
        "directory_resident_mib": _resident_mib(child.pid),
    }


def _start_nodes(group: ProcessGroup, address: str, count: int) -> None:
    flags = ["--dram", str(DRAM_BYTES), "--join", address]
    for first in range(0, count, TOGETHER):
        started = [
            start_node(group, all_cores(), f"node-{number}", *flags)
            for number in range(first, min(count, first + TOGETHER))
        ]
        for child, reports in started:
            wait_ready(child, reports)


def _cold(address: str, count: int) -> tuple[list[float], list[float]]:
    """Measures the seconds in which a new client connects, and then looks up a first (missing) key."""
    connects, first_gets = [], []
    for number in range(SAMPLES):
        begin = time.perf_counter()
        with connect(address, cluster_token=TOKEN, timeout_s=CONNECT_TIMEOUT_S) as store:
            connects.append(time.perf_counter() - begin)
            _until_known(store, count)
            begin = time.perf_counter()
            store.get(b"nobody has it %d" % number, timeout_s=RETRY_TIMEOUT_S)
            first_gets.append(time.perf_counter() - begin)
    return connects, first_gets


def _until_known(store: KvStore, count: int) -> None:
    """Waits until the client knows `count` nodes. Raises ContestantError on timeout."""
    _until(lambda: len(store.nodes()) == count, f"the client does not see {count} nodes")


def _until_indexed(address: str) -> Any:
    """Returns the directory's view once it knows all values. Raises ContestantError on timeout."""
    _until(lambda: servers.directory_view(address).num_keys >= NUM_VALUES, "the directory lacks values")
    return servers.directory_view(address)


def _until(holds: Callable[[], bool], complaint: str) -> None:
    give_up_at = time.monotonic() + KNOWN_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise ContestantError(complaint)
        time.sleep(POLL_S)


def _operations(store: KvStore) -> Point:
    """Measures single calls, each key once per sweep. Only the values of the latest sweep stay in the store."""
    value = bytes(VALUE_BYTES)
    sweeps = [[b"%d-%d" % (sweep, n) for n in range(NUM_VALUES)] for sweep in range(SAMPLES)]
    puts, gets, exists = [], [], []

    def put(key: bytes) -> None:
        with_retries(lambda: store.put(key, value, timeout_s=RETRY_TIMEOUT_S))

    for number, keys in enumerate(sweeps):
        if number:
            with_retries(partial(store.batch_remove, sweeps[number - 1], timeout_s=RETRY_TIMEOUT_S))
        puts.append(_timed(put, keys))
        gets.append(_timed(partial(store.get, timeout_s=RETRY_TIMEOUT_S), keys))
        exists.append(_timed(partial(store.exists, timeout_s=RETRY_TIMEOUT_S), keys))
    return {
        "put_s": median([len(took) / sum(took) for took in puts]),
        "get_s": median([len(took) / sum(took) for took in gets]),
        "exists_s": median([len(took) / sum(took) for took in exists]),
        "exists_p50_us": median([float(np.percentile(took, 50)) * 1e6 for took in exists]),
    }


def _timed(call: Callable[[bytes], object], keys: Sequence[bytes]) -> list[float]:
    """Returns the seconds of each call."""
    took = []
    for key in keys:
        begin = time.perf_counter()
        call(key)
        took.append(time.perf_counter() - begin)
    return took


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ContestantError("the directory has ended")
