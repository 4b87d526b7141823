"""Memory and processor time of one conductor, by instances and indexed blocks."""

import os
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.conductor.placement_load import Load, Scenario
from moonserve.conductor.events import Heartbeat, Place

NUM_PLACEMENTS = 2_000


def growth_rows(instances: Sequence[int], blocks: Sequence[int]) -> list[dict[str, Any]]:
    """Measures each size in a process of its own, since freed memory would hide what the next one needs."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(_row, (some, count)) for some in instances for count in blocks]


def _row(num_instances: int, num_blocks: int) -> dict[str, Any]:
    load = Load(Scenario(num_instances=num_instances, num_blocks=num_blocks))
    before = _resident_bytes()
    state = load.cluster("global-cache-aware")
    nbytes = _resident_bytes() - before
    spent: dict[type, list[float]] = {Place: [], Heartbeat: []}
    for at, event in load.script(NUM_PLACEMENTS, load.rate):
        began_s = time.thread_time()
        state.handle(event, at)
        spent.setdefault(type(event), []).append(time.thread_time() - began_s)
    beats = spent[Heartbeat]
    return {
        "instances": num_instances,
        "blocks": num_blocks,
        "MiB": nbytes / 2**20,
        "µs per placement": 1e6 * sum(spent[Place]) / len(spent[Place]),
        "µs per heartbeat": 1e6 * sum(beats) / len(beats),
        "cores for heartbeats": sum(beats) / len(beats) * num_instances * 1.5,
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
