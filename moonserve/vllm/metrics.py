"""Counters of the connector, summed over steps and workers and exported on vLLM's /metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_METRICS = {
    "moonserve_connector_tokens": ("op", "Tokens of blocks that were loaded, stored or fetched from a prefill server"),
    "moonserve_connector_bytes": ("op", "Bytes of blocks that were loaded, stored or fetched from a prefill server"),
    "moonserve_connector_failed_blocks": ("reason", "Blocks that could not be loaded, and are computed"),
    "moonserve_connector_skipped_saves": ("reason", "Blocks that were not stored"),
    "moonserve_connector_expired_handoffs": ("reason", "Prompts whose KV no decode server fetched in time"),
}
_PREFIX = "moonserve_connector_"
_SEPARATOR = "/"


class ConnectorStats(KVConnectorStats):
    """Events as in `step_plan.Counts`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        return ConnectorStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return {name.replace(_SEPARATOR, " "): count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters `moonserve_connector_*_total`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[PrometheusCounter]
        self._counters = {
            name: counter(name=name, documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in _METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            metric, label = name.split(_SEPARATOR)
            self._counters[f"{_PREFIX}{metric}"].labels(*self.per_engine_labelvalues[engine_idx], label).inc(amount)
