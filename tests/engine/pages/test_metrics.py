"""What a scrape of a page pool shows."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.pages import Eviction, PagePool, PoolConfig
from engine.pages.metrics import PagesCollector
from protocol.errors import Overloaded
from tests.engine.pages.conftest import MakeCore


def test_a_scrape_shows_blocks_counters_and_percentiles(make_core: MakeCore) -> None:
    """Under the pool's name, as the books say at that moment."""
    config = PoolConfig(num_blocks=10, eviction=Eviction.LRU)
    pool = PagePool(config, core=make_core(config))
    registry = CollectorRegistry()
    registry.register(PagesCollector("kv", pool))
    pool.allocate(1, 4), pool.allocate(1, 2), pool.allocate(2, 3, priority=1)
    pool.rest(1)
    with pytest.raises(Overloaded):
        pool.allocate(2, 9)
    value = registry.get_sample_value
    labels = {"pool": "kv"}
    assert value("moonserve_pages_blocks", {**labels, "state": "held"}) == 6
    assert value("moonserve_pages_blocks", {**labels, "state": "held_high"}) == 3
    assert value("moonserve_pages_blocks", {**labels, "state": "free"}) == 1
    assert value("moonserve_pages_allocations_total", labels) == 3
    assert value("moonserve_pages_allocated_blocks_total", labels) == 9
    assert value("moonserve_pages_short_total", {**labels, "outcome": "refused"}) == 1
    assert value("moonserve_pages_requests", labels) == 2
    assert value("moonserve_pages_evictable_requests", labels) == 1
    assert value("moonserve_pages_waiting", labels) == 0
    assert value("moonserve_pages_allocation_seconds_count", labels) == 5  # two were refused
    quantiles = [
        value("moonserve_pages_allocation_quantile_seconds", {**labels, "quantile": quantile})
        for quantile in ("0.5", "0.99", "0.999")
    ]
    assert 0 < quantiles[0] <= quantiles[1] <= quantiles[2]  # type: ignore[operator]
    buckets = [
        float(line.rsplit(" ", 1)[1])
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("moonserve_pages_allocation_seconds_bucket")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 5
