"""One request's time across all processes: in its reply, and as one trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gateway.ledger import PHASES
from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("tracing")
    make_model("llama", folder / "model")
    flags = ("--trace-dir", str(folder / "traces"), "--trace-sample-ratio", "0")
    with running_cluster(folder / "model", folder / "logs", *flags) as started:
        yield started


def spans(cluster: Cluster) -> list[dict[str, Any]]:
    """Of the one trace."""
    files = (cluster.log_dir.parent / "traces").glob("*.jsonl")
    found = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [span for span in found if span["context"]["trace_id"] == f"0x{TRACE}"]


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 300])
def test_the_phases_add_up_to_the_end_to_end_time(cluster: Cluster, num_tokens: int) -> None:
    """Also of answers that take a few milliseconds, and within what the client saw."""
    shares = []
    for first in range(5):
        prompt = list(range(1 + first, 100))
        began_at = time.monotonic()
        answer = cluster.complete(prompt, max_tokens=num_tokens, ignore_eos=True, x_timing=True)
        seen_s = time.monotonic() - began_at
        (timing,) = answer["x_timing"]
        phases = {phase: timing[f"{phase}_s"] for phase in PHASES}
        assert all(seconds >= 0 for seconds in phases.values())
        assert phases["prefill"] > 0
        # Nothing where the KV had landed before the first token was here.
        assert num_tokens > 1 or not phases["transfer"]
        assert phases["decode"] > 0 or num_tokens < 300  # a few may come as one, at once
        assert timing["ttft_s"] <= timing["e2e_s"] <= seen_s
        missing_s = timing["e2e_s"] - sum(phases.values())
        assert missing_s == pytest.approx(timing["unaccounted_s"], abs=1e-4)
        shares.append(abs(missing_s) / timing["e2e_s"])
    assert median(shares) <= 0.02, shares


def test_nobody_gets_it_unasked(cluster: Cluster) -> None:
    assert "x_timing" not in cluster.complete([1, 2, 3], max_tokens=3)


def test_a_stream_has_it_behind_its_output_for_every_choice(cluster: Cluster) -> None:
    wish = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "stream": True}
    wish |= {"n": 2, "x_timing": True, "stream_options": {"include_usage": True}}
    with cluster.client() as client:
        lines = client.post("/v1/completions", json=wish).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    timing, usage = (json.loads(line.removeprefix("data: ")) for line in lines[-4:-2])
    assert timing["choices"] == []
    assert [each["index"] for each in timing["x_timing"]] == [0, 1]
    assert usage["usage"]["completion_tokens"] == 8


def test_one_trace_passes_through_every_process(cluster: Cluster) -> None:
    """Only this client asks for one: the ratio is 0."""
    header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with cluster.client() as client:
        wish = {"prompt": list(range(1, 80)), "max_tokens": 8, "ignore_eos": True}
        assert client.post("/v1/completions", json=wish, headers=header).status_code == 200
        assert client.post("/v1/completions", json=wish).status_code == 200
    expected = {
        ("request", "gateway-0"),
        ("placing", "gateway-0"),
        ("place", "conductor"),
        *(("prefill", "prefill-0"), ("queue", "prefill-0")),
        *(("load", "prefill-0"), ("compute", "prefill-0"), ("transfer", "prefill-0")),
        *(("decode queue", "decode-0"), ("decode", "decode-0")),
    }
    cluster.wait_for("all spans", lambda: len(spans(cluster)) >= len(expected))
    found = spans(cluster)
    who = {(s["name"], s["resource"]["attributes"]["service.instance.id"]) for s in found}
    assert who == expected
    assert len(found) == len(expected), "each once, and nobody else's"
    by_name = {span["name"]: span for span in found}
    root = by_name["request"]["context"]["span_id"]
    below = {"queue", "load", "compute"}
    for name, span in by_name.items():
        if name == "request":
            assert span["parent_id"] == "0xb7ad6b7169203331"
        else:
            parent = by_name["prefill"]["context"]["span_id"] if name in below else root
            assert span["parent_id"] == parent, name
    assert by_name["request"]["attributes"]["output_tokens"] == 8
    assert by_name["decode"]["attributes"]["num_tokens"] == 7
    assert by_name["place"]["attributes"]["decode_instance"] == "decode-0"
