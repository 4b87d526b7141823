"""Part 1: compares put, get and exists with other stores and a plain copy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.store import seats
from benchmarks.store.bars import Bar, speed_bars
from benchmarks.store.contestants import Contestant
from benchmarks.store.figures import figures
from benchmarks.store.workload import loads
from benchmarks.transfer.pair import Placement
from benchmarks.transfer.quiet import Quiet


def measure(
    contestants: Sequence[Contestant],
    sizes: Sequence[str],
    *,
    rounds: int,
    min_s: float,
    placement: Placement,
) -> tuple[dict[str, Any], list[Bar]]:
    quiet = Quiet()
    work = loads(sizes)
    with (
        tempfile.TemporaryDirectory() as folder,
        seats.seated(contestants, Path(folder), placement) as seated,
    ):
        seats.verify(seated, work)
        seats.measure(seated, work, rounds=rounds, min_s=min_s)
        results = {seat.result.contestant.name: figures(seat.result, sizes) for seat in seated}
    part = {
        "sizes": list(sizes),
        "rounds": rounds,
        "placement": placement,
        "others_cores": quiet.others_cores(),
        "results": results,
    }
    return part, speed_bars(results, sizes)
