"""The last minute as a gateway remembers it, and what its metrics say about the decode workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.cluster.figures import (
    _MAX_PREFIXES,
    _NUM_LATEST,
    WINDOW_S,
    DecodeFigures,
    Ended,
    Figures,
)
from protocol.keys import BlockKey
from protocol.metrics import RequestMetrics
from protocol.pb import common_pb2, conductor_pb2


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def test_percentiles_are_of_the_last_minute() -> None:
    figures = Figures()
    figures.ttft.add(100.0, now=0.0)
    for count in range(1, 101):
        figures.ttft.add(count / 100, now=50.0)
    shown = figures.as_json(now=WINDOW_S + 1.0)["ttft_s"]
    assert shown["count"] == 100
    assert 0.49 < shown["p50"] < 0.52
    assert 0.98 < shown["p99"] <= 1.0


def test_without_samples_there_are_no_percentiles() -> None:
    assert Figures().as_json(1.0)["tbt_s"] == {"p50": None, "p95": None, "p99": None, "count": 0}


def test_prefixes_cool_down_and_the_hottest_come_first() -> None:
    figures = Figures()
    for now in range(4):
        figures.reused(key(1), 64, ["prefill-0"], float(now))
    figures.reused(key(2), 32, ["prefill-0", "store-0"], 300.0)
    first, second = figures.hot_prefixes(300.0)
    assert (first["tokens"], first["holders"]) == (32, ["prefill-0", "store-0"])
    assert second["heat"] < 0.2


def test_the_memory_of_prefixes_is_bounded() -> None:
    figures = Figures()
    for number in range(_MAX_PREFIXES + 10):
        figures.reused(key(number), 32, [], float(number))
    assert len(figures._prefixes) == _MAX_PREFIXES
    assert key(9) not in figures._prefixes


def test_the_latest_requests_come_first_and_the_others_are_forgotten() -> None:
    figures = Figures()
    for number in range(_NUM_LATEST + 3):
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 1}
        times = {"ttft_s": 0.1, "e2e_s": 0.2}
        figures.ended(Ended(request_id=f"req-{number}", outcome="stop", **counts, **times))
    shown = figures.latest_requests()
    assert len(shown) == _NUM_LATEST
    assert shown[0]["request_id"] == f"req-{_NUM_LATEST + 2}"
    assert shown[-1]["request_id"] == "req-3"


def worker(
    name: str, *, preemptions: int, held: int = 0, epoch: int = 1
) -> conductor_pb2.InstanceView:
    return conductor_pb2.InstanceView(
        endpoint=common_pb2.Endpoint(instance_id=name, epoch=epoch),
        role=common_pb2.ROLE_DECODE,
        num_blocks=10,
        load=conductor_pb2.Load(held_blocks=held, leased_blocks=1, num_preemptions=preemptions),
    )


class Seen:
    """Figures fed with views, and the metric values they lead to."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._figures = DecodeFigures(RequestMetrics(self._registry, "model", "gateway-0", ()))

    def take(self, *workers: conductor_pb2.InstanceView) -> None:
        self._figures.take(conductor_pb2.ClusterView(instances=workers))

    def value(self, name: str) -> float | None:
        labels = {"model_name": "model", "engine": "gateway-0"}
        return self._registry.get_sample_value(name, labels)


def test_usage_is_the_share_of_all_decode_blocks() -> None:
    seen = Seen()
    prefill = conductor_pb2.InstanceView(role=common_pb2.ROLE_PREFILL, num_blocks=100)
    seen.take(worker("a", preemptions=0, held=3), worker("b", preemptions=0, held=5), prefill)
    assert seen.value("vllm:kv_cache_usage_perc") == 0.5
    seen.take(prefill)
    assert seen.value("vllm:kv_cache_usage_perc") == 0.0


def test_preemptions_are_counted_once_and_across_restarts() -> None:
    seen = Seen()
    seen.take(worker("a", preemptions=2), worker("b", preemptions=1))
    seen.take(worker("a", preemptions=2), worker("b", preemptions=4))
    assert seen.value("vllm:num_preemptions_total") == 6
    seen.take(worker("b", preemptions=4))  # a is not heard of for a while
    seen.take(worker("a", preemptions=3, epoch=2), worker("b", preemptions=4))
    assert seen.value("vllm:num_preemptions_total") == 9
