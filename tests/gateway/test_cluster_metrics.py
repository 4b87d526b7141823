"""Pages of several processes as one."""

from __future__ import annotations

import aiohttp
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.cluster.metrics import merged

NAMES = st.text(min_size=1, max_size=8)


def page(tenants: dict[str, int], *, with_gauge: bool = False) -> str:
    registry = CollectorRegistry()
    counter = Counter("served", "Of a tenant.", ("tenant",), registry=registry)
    for tenant, count in tenants.items():
        counter.labels(tenant).inc(count)
    if with_gauge:
        Gauge("free_bytes", "Room.", registry=registry).set(7)
    return generate_latest(registry).decode()


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, st.integers(0, 9), max_size=3), max_size=4))
def test_every_sample_is_there_once_with_its_process(served: dict[str, dict[str, int]]) -> None:
    """Whatever stands in labels, as Prometheus' own parser reads it."""
    whole = merged({process: page(tenants) for process, tenants in served.items()})
    found = [
        ((sample.labels["process"], sample.labels["tenant"]), sample.value)
        for family in text_string_to_metric_families(whole)
        for sample in family.samples
        if sample.name == "served_total"
    ]
    expected = {(p, t): float(n) for p, tenants in served.items() for t, n in tenants.items()}
    assert dict(found) == expected
    assert len(found) == len(expected)


def test_a_family_stands_together_below_one_header() -> None:
    whole = merged({"a": page({"x": 1}, with_gauge=True), "b": page({"y": 2}, with_gauge=True)})
    assert whole.count("# TYPE served_total counter\n") == 1
    assert whole.count("# HELP free_bytes Room.\n") == 1
    assert 'free_bytes{process="a"} 7.0\nfree_bytes{process="b"} 7.0\n' in whole


async def test_processes_that_do_not_answer_are_named(http: aiohttp.ClientSession) -> None:
    """The scripted conductor and workers serve no metrics."""
    async with http.get("/metrics/cluster") as response:
        assert response.status == 200
        text = await response.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    up = {s.labels["process"]: s.value for s in families["moonserve_up"].samples}
    assert up.pop("gateway-0") == 1
    assert {"prefill-0", "decode-0"} < set(up)
    assert not any(up.values())
    running = families["vllm:num_requests_running"].samples
    assert [sample.labels["process"] for sample in running] == ["gateway-0"]
    phases = {s.labels["phase"] for s in families["moonserve_requests"].samples}
    assert phases == {"placing", "paused", "prefilling", "decoding"}
