"""Why a request went where it went, asked of a real cluster with the ids that its client has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("explain")
    make_model("llama", folder / "model")
    with running_cluster(folder / "model", folder / "logs", "--decode-workers", "2") as started:
        # One of them is enough to be ready.
        started.wait_for(
            "both decode workers", lambda: started.epoch("decode-0") and started.epoch("decode-1")
        )
        yield started


def explained(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """Once the end of the request has reached the conductor."""
    found: list[dict[str, Any]] = []

    def is_concluded() -> bool:
        with cluster.client() as client:
            reply = client.get(f"/v1/requests/{request_id}/explain")
            assert reply.status_code == 200, reply.text
        found.append(reply.json())
        outcome = found[-1]["decisions"][0]["outcome"]
        return outcome is not None and outcome["phase"] == "finished"

    cluster.wait_for("the report of the request's end", is_concluded)
    return found[-1]


def test_a_decision_has_all_candidates_the_choice_and_what_then_happened(cluster: Cluster) -> None:
    answer = cluster.complete(list(range(1, 41)), max_tokens=4, ignore_eos=True)
    (decision,) = explained(cluster, answer["id"])["decisions"]
    assert [c["instance_id"] for c in decision["prefill_candidates"]] == ["prefill-0"]
    assert {c["instance_id"] for c in decision["decode_candidates"]} == {"decode-0", "decode-1"}
    assert decision["prefill"] == "prefill-0"
    (best,) = decision["prefill_candidates"]
    assert 0 < best["ttft_s"] <= decision["predicted_ttft_s"]
    assert decision["outcome"]["output_tokens"] == 4
    assert 0 < decision["outcome"]["ttft_s"] <= decision["outcome"]["elapsed_s"]


def test_the_command_shows_tables_or_json_for_the_name_that_the_client_gave(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster.client() as client:
        wish = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        headers = {"x-request-id": "my/first+request"}
        reply = client.post("/v1/completions", json=wish, headers=headers)
        name = reply.headers["x-request-id"]
    assert name == "my/first+request"
    concluded = explained(cluster, name)
    capsys.readouterr()
    assert main(["explain", name, "--url", cluster.url]) == 0
    text = capsys.readouterr().out
    chosen = concluded["decisions"][0]["decode"]
    marked = [line.split()[1] for line in text.splitlines() if line.startswith("→")]
    assert marked == ["prefill-0", chosen]
    assert "finished after" in text
    assert "with 3 tokens" in text
    assert main(["explain", name, "--url", cluster.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == concluded


def test_an_unknown_id_is_said_with_what_to_do(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster.client() as client:
        reply = client.get("/v1/requests/cmpl-never/explain")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "--num-decisions" in error["message"]
    assert main(["explain", "cmpl-never", "--url", cluster.url]) == 1
    assert "last 4096 requests" in capsys.readouterr().err
