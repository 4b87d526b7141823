"""Tests of `deploy/monitoring`: programs load its files. Its expressions and vLLM's boards have values under load."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from moonserve.models import demo_model_path
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.load import BackgroundLoad
from tests.processes import binary
from tests.prometheus import Prometheus, running_prometheus

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "moonserve.json"
BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
CACHES = ("prefix_cache", "external_prefix_cache")

# Histograms in the panels of vLLM's own boards for Grafana (vLLM 0.32, examples/observability).
VLLM_HISTOGRAMS = (
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_time_per_output_token_seconds", "iteration_tokens_total"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens"),
)


def vllm_expressions() -> Iterator[str]:
    """Yields queries of these boards, without those for which a cluster has nothing equal (docs/monitoring.md)."""
    of, rate = '{model_name=~".*demo", engine=~".+"}', '{model_name=~".*demo", engine=~".+"}[1m]'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        yield f"sum by (instance, engine) (vllm:{name}{of})"
    for name in VLLM_HISTOGRAMS:
        yield f"histogram_quantile(0.95, sum by (le) (rate(vllm:{name}_bucket{rate})))"
        yield f"rate(vllm:{name}_sum{rate}) / (rate(vllm:{name}_count{rate}) > 0)"
    for name in ("generation_tokens", "num_preemptions", "request_success", "prompt_tokens_by_source"):
        yield f"sum by (model_name, source, finished_reason) (rate(vllm:{name}_total{rate}))"
    for part, whole in (("prompt_tokens_cached", "prompt_tokens"), *((f"{w}_hits", f"{w}_queries") for w in CACHES)):
        yield f"sum(rate(vllm:{part}_total{rate})) / (sum(rate(vllm:{whole}_total{rate})) > 0)"


def expressions() -> Iterator[str]:
    """Yields those of the dashboard, and the value that each alert compares: a comparison is empty until it fires."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "1m")
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        compared = re.fullmatch(r"(?P<value>.+) [<>] [0-9.]+", rule["expr"])
        assert compared is not None, f"{rule['alert']} is no comparison with a number"
        yield compared["value"]


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    check = [binary("promtool"), "check", "config", str(MONITORING / "prometheus.yml")]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout


def test_the_dashboard_loads_without_edits() -> None:
    """Panels use the dashboard's selectable data source; no id of another Grafana remains."""
    assert (BOARD["uid"], "id" in BOARD) == ("moonserve", False)
    assert [v["type"] for v in BOARD["templating"]["list"]] == ["datasource"]
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
    for path in MONITORING.glob("grafana/provisioning/*/*.yml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_every_expression_of_dashboard_and_alerts_has_values_under_load(tmp_path: Path) -> None:
    disk = f"{tmp_path}/disk:64MiB"
    with running_cluster(demo_model_path(), tmp_path / "logs", "--ssd", disk) as cluster:
        config = configured(cluster, tmp_path)
        with running_prometheus(config, tmp_path) as prometheus, BackgroundLoad(cluster, 4096, streams=3, pause_s=0.1):
            missing = [*expressions(), *vllm_expressions()]
            scrapes = "count_over_time(up[1m])"
            cluster.wait_for("two scrapes", lambda: min(prometheus.values(scrapes), default=0) >= 2)
            while missing:
                expression = missing.pop()
                cluster.wait_for(f"a value of {expression}", lambda e=expression: has_values(prometheus, e))
            rules = prometheus.ask("rules")["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
            with cluster.client() as client:
                told = re.findall(r"^# TYPE (\S+)", client.get("/metrics/cluster").text, re.MULTILINE)
            page = (MONITORING.parents[1] / "docs" / "metrics.md").read_text()  # has no `_created` time of a series
            missing = [name for name in told if not name.endswith("_created") and f"`{name}`" not in page]
            assert not missing, "docs/metrics.md does not have them"


def configured(cluster: Cluster, folder: Path) -> Path:
    """Writes the shipped configuration with shorter intervals and this cluster's address."""
    text = (MONITORING / "prometheus.yml").read_text()
    for shipped, here in (
        ("127.0.0.1:8000", cluster.url.removeprefix("http://")),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
        ("- alerts.yml", f"- {MONITORING}/alerts.yml"),
    ):
        assert shipped in text
        text = text.replace(shipped, here)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


def has_values(prometheus: Prometheus, expression: str) -> bool:
    values = prometheus.values(expression)
    return bool(values) and not any(math.isnan(value) for value in values)
