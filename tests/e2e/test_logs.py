"""One request can be followed by its id through the logs of all processes, and a lost worker is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.e2e.cluster import UNHURRIED, Cluster, running_cluster
from tests.e2e.sse import read_completion
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

FLAGS = (
    "--store-nodes",
    "0",
    "--decode-workers",
    "2",
    "--log-format",
    "json",
    "--log-level",
    "debug",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("logs")
    make_model("llama", folder / "model", max_position_embeddings=4096)
    with running_cluster(folder / "model", folder / "logs", *FLAGS, *UNHURRIED) as started:
        yield started


def records(cluster: Cluster, process: str) -> list[dict[str, Any]]:
    """Every line of its log: each must be an object."""
    text = (cluster.log_dir / f"{process}.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


def about(cluster: Cluster, process: str, known_id: str) -> list[str]:
    """Messages of the lines that concern the request which its client knows by this id."""
    found = (record for record in records(cluster, process) if "request_id" in record)
    return [each["message"] for each in found if each["request_id"].startswith(known_id)]


def test_a_request_is_followed_by_its_id_through_every_process(cluster: Cluster) -> None:
    with cluster.client() as client:
        body = {"prompt": [7] * 100, "max_tokens": 5, "ignore_eos": True}
        client.headers["x-request-id"] = "follow-me"
        reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200
    decode = reply.headers["x-decode-instance-id"]
    expected = {
        "conductor": [f"placed: prefill-0, then {decode}"],
        "prefill-0": ["taken: 100 tokens", "first token: 0 tokens cached", "handed over to dec"],
        decode: ["landed:", "ended with token 4: length"],
        "gateway-0": ["finished: length; 100 prompt tokens, 0 of them cached, 5 generated; first "],
    }
    for process, beginnings in expected.items():
        cluster.wait_for(
            f"the lines of {process}",
            lambda p=process, b=beginnings: len(about(cluster, p, "follow-me")) >= len(b),
        )
        messages = about(cluster, process, "follow-me")
        for message, beginning in zip(messages, beginnings, strict=True):
            assert message.startswith(beginning), messages
    [end] = [r for r in records(cluster, "gateway-0") if r["logger"] == "gateway.request_log"]
    assert re.fullmatch(r"follow-me-[0-9a-f]{8}", end["request_id"])
    assert (end["prefill"], end["decode"]) == ("prefill-0", decode)
    assert 0 < end["ttft_s"] <= end["e2e_s"]


def test_no_line_names_a_request_that_a_program_could_not_find(cluster: Cluster) -> None:
    """An id in a message alone would be lost to whoever filters by the member."""
    for process in ("conductor", "prefill-0", "decode-0", "decode-1", "gateway-0"):
        for record in records(cluster, process):
            if re.search(r"\b(?:req-[0-9a-f]+|follow-me)", record["message"]):
                assert "request_id" in record, record


def test_a_killed_worker_is_one_line_of_the_launcher_and_one_of_the_gateway(
    cluster: Cluster,
) -> None:
    """The stream is long enough to be under way when it is known where it is."""
    kills = {name: cluster.killer(name) for name in ("decode-0", "decode-1")}
    killed: list[str] = []

    def on_tokens(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(where("survivor", client))
            kills[killed[0]]()

    with cluster.client() as client:
        client.headers["x-request-id"] = "survivor"
        body = {"prompt": [9] * 40, "max_tokens": 3500, "ignore_eos": True}
        tokens = read_completion(client, {**body, "return_token_ids": True}, on_tokens)[1]
    assert len(tokens) == 3500
    cluster.wait_for("the launcher's line", lambda: '"exit_code"' in cluster.output)
    [told] = [line for line in cluster.output.splitlines() if '"exit_code"' in line]
    death = json.loads(told)
    assert (death["child"], death["exit_code"], death["level"]) == (killed[0], -9, "error")
    assert re.match(r"decode-\d was killed by SIGKILL.*; it is started again", death["message"])
    warnings = [r["message"] for r in records(cluster, "gateway-0") if r["level"] == "warning"]
    [lost] = [message for message in warnings if f"{killed[0]} is lost" in message]
    assert "1 of its requests" in lost
    cluster.wait_for("its end", lambda: len(about(cluster, "gateway-0", "survivor")) >= 2)
    again, end = about(cluster, "gateway-0", "survivor")
    assert again.startswith("goes on elsewhere, attempt 2")
    assert end.startswith("finished: length; 40 prompt tokens")


def where(known_id: str, client: httpx.Client) -> str:
    """The decode worker of a request that is under way."""
    explained = client.get(f"/v1/requests/{known_id}/explain").json()
    decode: str = explained["decisions"][0]["decode"]
    return decode
