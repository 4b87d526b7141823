"""The gateway's figures of the cluster: those of the last minute, and all processes' metrics merged into one page."""

import aiohttp
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moonserve.gateway.cluster import request_metrics
from moonserve.gateway.cluster.metrics_page import merge_pages
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import common_pb2, conductor_pb2
from moonserve.protocol.request import Endpoint, Placement, PrefixSource, RequestId
from tests.gateway.conftest import get


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def test_percentiles_cover_the_last_minute() -> None:
    figures = request_metrics.RecentFigures()
    figures.ttft.add(100.0, now=0.0)
    for count in range(1, 101):
        figures.ttft.add(count / 100, now=50.0)
    shown = figures.as_json(now=request_metrics.WINDOW_S + 1.0)
    assert shown["ttft_s"]["count"] == 100
    assert 0.49 < shown["ttft_s"]["p50"] < 0.52
    assert 0.98 < shown["ttft_s"]["p99"] <= 1.0
    assert shown["tbt_s"] == {"p50": None, "p95": None, "p99": None, "count": 0}


def test_prefixes_cool_down_and_are_sorted_and_bounded() -> None:
    figures = request_metrics.RecentFigures()
    for now in range(4):
        figures.reused(key(1), range(99), 64, ["prefill-0"], float(now))
    figures.reused(key(2), range(99), 32, ["prefill-0", "store-0"], 300.0)
    first, second = figures.hot_prefixes(300.0, lambda tokens: f"{tokens[0]}-{tokens[-1]}")
    assert (first["text"], second["text"]) == ("0-23 … 24-31", "0-23 … 40-63")
    assert [prefix["text"] for prefix in figures.hot_prefixes(300.0, None)] == [None, None]
    assert (first["tokens"], first["holders"]) == (32, ["prefill-0", "store-0"])
    assert second["heat"] < 0.2
    for number in range(3, request_metrics._MAX_PREFIXES + 3):
        figures.reused(key(number), range(99), 32, [], 300.0)
    assert len(figures._prefixes) == request_metrics._MAX_PREFIXES
    assert key(2) not in figures._prefixes


def test_cached_tokens_count_by_their_source_and_as_flows() -> None:
    """Blocks 2 and 3 are read on the worker's host, 4 to 7 from another, of which only half a block was used."""
    near, far, prefill, decode = (
        Endpoint(instance_id=name, epoch=1, rpc_address="", transfer_address="", host=host)
        for name, host in (("near", "a"), ("far", "b"), ("prefill", "a"), ("decode", "b"))
    )
    runs = ((near, 2, 2), (far, 4, 4))
    sources = tuple(PrefixSource(store=store, first_block=at, num_blocks=count) for store, at, count in runs)
    placement = Placement(request_id=RequestId("r"), prefill=prefill, decode=decode, prefix_sources=sources)
    figures = request_metrics.RecentFigures()
    assert figures.placed(placement, 160, 72, 16) == 40
    assert [figures.totals[name] for name in request_metrics._CACHES] == [32, 32, 8]
    sent = {("gateway", "prefill"): 160, ("prefill", "decode"): 160}
    assert figures.flows == sent | {("near", "prefill"): 32, ("far", "prefill"): 8}
    for number in range(2 * request_metrics._MAX_FLOWS):
        figures.moved("gateway", f"{number}", 1)
    assert len(figures.flows) == request_metrics._MAX_FLOWS


def worker(name: str, *, preemptions: int, held: int = 0, epoch: int = 1) -> conductor_pb2.InstanceView:
    return conductor_pb2.InstanceView(
        endpoint=common_pb2.Endpoint(instance_id=name, epoch=epoch),
        role=common_pb2.ROLE_DECODE,
        num_blocks=10,
        load=conductor_pb2.Load(held_blocks=held, leased_blocks=1, num_preemptions=preemptions),
    )


def test_decode_metrics_sum_usage_and_preemptions_across_restarts() -> None:
    registry = CollectorRegistry()
    figures = request_metrics.DecodeMetrics(request_metrics.RequestMetrics(registry, "model", "gateway-0", ()))

    def metrics_after(*workers: conductor_pb2.InstanceView) -> tuple[float | None, float | None]:
        figures.take(conductor_pb2.ClusterView(instances=workers))
        labels = {"model_name": "model", "engine": "gateway-0"}
        usage = registry.get_sample_value("vllm:kv_cache_usage_perc", labels)
        return usage, registry.get_sample_value("vllm:num_preemptions_total", labels)

    prefill = conductor_pb2.InstanceView(role=common_pb2.ROLE_PREFILL, num_blocks=100)
    first = (worker("a", preemptions=2, held=3), worker("b", preemptions=1, held=5))
    assert metrics_after(*first, prefill) == (0.5, 3)
    assert metrics_after(prefill) == (0.0, 3)
    assert metrics_after(worker("a", preemptions=2), worker("b", preemptions=4))[1] == 6
    assert metrics_after(worker("b", preemptions=4))[1] == 6  # a is missing for a while
    assert metrics_after(worker("a", preemptions=3, epoch=2), worker("b", preemptions=4))[1] == 9


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
def test_merged_page_has_every_sample_once_with_its_process(served: dict[str, dict[str, int]]) -> None:
    """Prometheus' own parser finds every sample once, whatever text the labels contain."""
    whole = merge_pages({process: page(tenants) for process, tenants in served.items()})
    found = [
        ((sample.labels["process"], sample.labels["tenant"]), sample.value)
        for family in text_string_to_metric_families(whole)
        for sample in family.samples
        if sample.name == "served_total"
    ]
    expected = {(p, t): float(n) for p, tenants in served.items() for t, n in tenants.items()}
    assert dict(found) == expected
    assert len(found) == len(expected)


def test_samples_of_a_family_follow_one_header() -> None:
    whole = merge_pages({"a": page({"x": 1}, with_gauge=True), "b": page({"y": 2}, with_gauge=True)})
    assert whole.count("# TYPE served_total counter\n") == 1
    assert whole.count("# HELP free_bytes Room.\n") == 1
    assert 'free_bytes{process="a"} 7.0\nfree_bytes{process="b"} 7.0\n' in whole


async def test_processes_that_do_not_reply_are_listed_as_down(http: aiohttp.ClientSession) -> None:
    """The cluster's metrics mark processes as down if they serve none, like the scripted conductor and workers."""
    text = await get(http, "/metrics/cluster")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    up = {s.labels["process"]: s.value for s in families["moonserve_up"].samples}
    assert up.pop("gateway-0") == 1
    assert {"prefill-0", "decode-0"} < set(up)
    assert not any(up.values())
