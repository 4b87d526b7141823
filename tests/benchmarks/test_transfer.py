"""Tests of the contest of transfer engines: absent contestants have a reason, and wrong bytes are found."""

import sys
from pathlib import Path

import numpy as np

from benchmarks.transfer import contest
from benchmarks.transfer.contest import Placement
from benchmarks.transfer.contestant import Contestant
from benchmarks.transfer.workload import POOL_BYTES, SIZES, differing_blocks, pattern, throughput

LOAD = throughput("read", *SIZES["1 MiB"])


def test_a_contestant_has_samples_and_a_missing_one_a_reason(tmp_path: Path) -> None:
    modules = ("benchmarks.transfer.contestants.memory_copy:Copy", "benchmarks.transfer.contestants.nobody:")
    contestants = [Contestant(name=module, group="peer", module=module, options={"huge": False}) for module in modules]
    with contest.open_entrants(contestants, lambda _: Path(sys.executable), tmp_path, Placement.APART) as seats:
        contest.verify(seats, [LOAD])
        contest.measure(seats, [LOAD], rounds=1, min_s=0.001)
    copy, nobody = (seat.result for seat in seats)
    (sample,) = copy.samples[LOAD, ""]
    assert (copy.absent, copy.errors, sample.nbytes) == (None, {}, 128 << 20)
    assert "No module named" in (nobody.absent or "")


def test_one_wrong_byte_is_one_differing_block() -> None:
    source, landed = pattern(), np.zeros(POOL_BYTES, np.uint8)
    for remote, local in np.concatenate(LOAD.batches()).reshape(-1, 2).tolist():
        landed[local : local + LOAD.block_bytes] = source[remote : remote + LOAD.block_bytes]
    assert differing_blocks(landed, LOAD) == 0
    landed[12345] ^= 1
    assert differing_blocks(landed, LOAD) == 1
