"""What the contestants of the transfer benchmark do, and how it is verified."""

import numpy as np
import pytest

from benchmarks.transfer.workload import (
    LATENCY,
    LOCAL,
    POOL_BYTES,
    REMOTE,
    SIZES,
    Load,
    differing_blocks,
    pattern,
    throughput,
)

LOADS = [LATENCY, *(throughput("read", *size) for size in SIZES.values())]


@pytest.mark.parametrize("load", LOADS)
def test_a_sweep_touches_no_place_twice_and_stays_in_the_pool(load: Load) -> None:
    offsets = np.concatenate(load.batches()).reshape(-1, 2)
    for end in (REMOTE, LOCAL):
        assert len(np.unique(offsets[:, end])) == len(offsets)
        assert offsets[:, end].min() >= 0
        assert offsets[:, end].max() + load.block_bytes <= POOL_BYTES


def test_the_same_load_is_the_same_work_in_every_process() -> None:
    load = throughput("write", *SIZES["1000×16 KiB"])
    for one, other in zip(load.batches(), load.batches(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_wrong_byte_is_one_differing_block() -> None:
    load = throughput("read", *SIZES["1 MiB"])
    source, landed = pattern(), np.zeros(POOL_BYTES, np.uint8)
    for remote, local in np.concatenate(load.batches()).reshape(-1, 2).tolist():
        landed[local : local + load.block_bytes] = source[remote : remote + load.block_bytes]
    assert differing_blocks(landed, load) == 0
    landed[12345] ^= 1
    assert differing_blocks(landed, load) == 1
