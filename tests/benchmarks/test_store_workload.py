"""Every store is asked for the same, and what it answers is compared byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.store import workload
from benchmarks.store.workload import HALF_BYTES, POOL_BYTES, SIZES, Load

MIB = 1 << 20


@pytest.mark.parametrize("size", SIZES)
def test_a_sweep_has_every_value_once_and_every_place_once(size: str) -> None:
    load = Load("get", *SIZES[size])
    sources = workload.source_batches(load, "stock")
    landings = workload.landing_batches(load, "stock")
    keys = [key for batch in landings for key in batch.keys]
    offsets = [offset for batch in landings for offset in batch.offsets]
    assert sorted(keys) == sorted(key for batch in sources for key in batch.keys)
    assert len(set(keys)) == load.num_values
    assert sorted(offsets) == list(range(HALF_BYTES, POOL_BYTES, load.value_bytes))
    assert {len(batch.keys) for batch in landings} == {load.batch}


def test_a_value_is_put_from_the_place_of_its_number() -> None:
    for batch in workload.source_batches(Load("put", MIB, 16), "fresh"):
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            assert offset == int(key.rpartition("-")[2]) * MIB


def test_neighbouring_values_differ_and_a_single_wrong_byte_is_found() -> None:
    pool = np.empty(POOL_BYTES, np.uint8)
    workload.fill(pool)
    batches = workload.landing_batches(Load("get", MIB, 16), "stock")
    assert workload.num_differing(pool, batches) == 128
    for batch in batches:
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            source = int(key.rpartition("-")[2]) * MIB
            pool[offset : offset + MIB] = pool[source : source + MIB]
    assert workload.num_differing(pool, batches) == 0
    pool[HALF_BYTES + 5 * MIB + 77] ^= 1
    assert workload.num_differing(pool, batches) == 1
