"""What a gateway's metrics say about the decode workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gateway.cluster.decode_figures import DecodeFigures
from protocol.metrics import request_metrics
from protocol.pb import common_pb2, conductor_pb2


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
        self._figures = DecodeFigures(request_metrics(self._registry, "model", "gateway-0", ()))

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
