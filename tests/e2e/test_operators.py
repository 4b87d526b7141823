"""Operators' view of a live cluster: why a request was placed where it was, its time and its log lines across all
processes, heartbeats of workers, and the commands `moonserve explain`, `top` and `replay`."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import pytest

from moonserve.gateway.generation.request_timing import PHASES
from moonserve.models import demo_model_path
from tests.collector import Receiver, attributes_of, running_collector
from tests.commands import Command
from tests.e2e.cluster import GREEDY, UNHURRIED, Cluster, prompt_of, running_cluster
from tests.e2e.load import read_choice
from tests.patience import PATIENCE_S
from tests.terminal import terminal

COMMAND = (sys.executable, "-m", "moonserve")
TRIES = 5
DECODES = ("decode-0", "decode-1")
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("operators")
    flags = (
        *(*UNHURRIED, "--decode-workers", "2", "--log-format", "json", "--log-level", "debug"),
        *("--trace-sample-ratio", "0", "--otlp-traces-endpoint"),
    )
    with running_collector(folder) as url, running_cluster(demo_model_path(), folder / "logs", *flags, url) as started:
        # The cluster is ready with one of them.
        started.wait_for("both decode workers", lambda: all(map(started.epoch, DECODES)))
        yield started


def post(cluster: Cluster, body: dict[str, Any], **headers: str) -> httpx.Response:
    with cluster.client() as client:
        reply = client.post("/v1/completions", json={"ignore_eos": True, **body}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


# Explanations


def explained(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """Returns the only decision about a request, once its end is reported to the conductor."""
    found: list[dict[str, Any]] = []

    def is_concluded() -> bool:
        found[:] = cluster.decisions(request_id)
        outcome = found[0]["outcome"]
        return outcome is not None and outcome["phase"] == "finished"

    cluster.wait_for("the report of the request's end", is_concluded)
    [decision] = found
    return decision


def test_a_request_is_explained_by_the_clients_request_id(cluster: Cluster, moonserve: Command) -> None:
    """The explanation has all candidates, the choice and the outcome, as tables and as JSON."""
    name = "my/first+request"
    reply = post(cluster, {"prompt": list(range(1, 41)), "max_tokens": 4}, **{"x-request-id": name})
    assert reply.headers["x-request-id"] == name
    decision = explained(cluster, name)
    [best] = decision["prefill_candidates"]
    assert best["instance_id"] == decision["prefill"] == "prefill-0"
    assert {c["instance_id"] for c in decision["decode_candidates"]} == set(DECODES)
    assert decision["rank"] > 0.0, "a prompt yields by its own prefill time"
    assert 0 < best["ttft_s"] <= decision["predicted_ttft_s"]
    assert decision["outcome"]["output_tokens"] == 4
    assert 0 < decision["outcome"]["ttft_s"] <= decision["outcome"]["elapsed_s"]
    said = moonserve("explain", name, "--url", cluster.url, ends=0)
    assert [line.split()[1] for line in said.lines if line.startswith("→")] == ["prefill-0", decision["decode"]]
    assert "finished after" in said.out
    assert "with 4 tokens" in said.out
    said = moonserve("explain", name, "--url", cluster.url, "--json", ends=0)
    assert json.loads(said.out)["decisions"] == [decision]
    assert "last 4096 requests" in moonserve("explain", "cmpl-never", "--url", cluster.url, ends=1).err


# Time


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 100])
def test_the_phases_add_up_to_the_end_to_end_time(cluster: Cluster, num_tokens: int) -> None:
    """The phases add up, also for answers of a few milliseconds, and stay within the time that the client measured."""
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
        # Zero if the KV arrives before the first token.
        assert num_tokens > 1 or not phases["transfer"]
        assert phases["decode"] > 0 or num_tokens < 100  # a few tokens may arrive at once
        assert timing["ttft_s"] <= timing["e2e_s"] <= seen_s
        missing_s = timing["e2e_s"] - sum(phases.values())
        assert missing_s == pytest.approx(timing["unaccounted_s"], abs=1e-4)
        shares.append(abs(missing_s) / timing["e2e_s"])
    assert median(shares) <= 0.02, shares


def test_a_stream_ends_with_the_timing_of_every_choice(cluster: Cluster) -> None:
    wish = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "n": 2, "x_timing": True}
    lines = post(cluster, {**wish, "stream_options": {"include_usage": True}}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    timing, usage = (json.loads(line.removeprefix("data: ")) for line in lines[-4:-2])
    assert timing["choices"] == []
    assert [each["index"] for each in timing["x_timing"]] == [0, 1]
    assert usage["usage"]["completion_tokens"] == 8


def test_one_trace_passes_through_every_process(cluster: Cluster) -> None:
    """Only this client requests a trace, because the sampling ratio is 0. Spans go through a real collector."""
    header = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    wish = {"prompt": list(range(1, 80)), "max_tokens": 8}
    reply = post(cluster, wish, **header)
    decode = reply.headers["x-decode-instance-id"]
    assert "x_timing" not in post(cluster, wish).json()
    expected = {
        *(("request", "gateway-0"), ("placing", "gateway-0"), ("place", "conductor")),
        *((name, "prefill-0") for name in ("prefill", "queue", "load", "compute", "transfer")),
        *((name, decode) for name in ("decode queue", "decode")),
    }
    cluster.wait_for("all spans", lambda: len(Receiver.spans) >= len(expected))
    assert {(span.name, process) for process, span in Receiver.spans} == expected
    assert len(Receiver.spans) == len(expected), "each once, and nobody else's"
    by_name = {span.name: span for _, span in Receiver.spans}
    parents = dict.fromkeys(("queue", "load", "compute"), by_name["prefill"].span_id)
    parents["request"] = bytes.fromhex("b7ad6b7169203331")
    for name, span in by_name.items():
        parent = parents.get(name, by_name["request"].span_id)
        assert (span.trace_id.hex(), span.parent_span_id) == (TRACE_ID, parent), name
    request = {name.removeprefix("gen_ai."): value for name, value in attributes_of(by_name["request"]).items()}
    assert (request["usage.input_tokens"], request["usage.output_tokens"], request["request.max_tokens"]) == (79, 8, 8)
    assert 0 < request["latency.time_to_first_token"] < request["latency.e2e"]
    assert request["request.model"] == reply.json()["model"]
    assert attributes_of(by_name["decode"])["num_tokens"] == 7
    assert attributes_of(by_name["place"])["decode_instance"] == decode


def test_the_gateways_metrics_have_bandwidths_and_steps_of_workers(cluster: Cluster) -> None:
    wish = {"prompt": prompt_of("heartbeats", 3_000), "max_tokens": 50}
    decode = post(cluster, wish).headers["x-decode-instance-id"]

    def written() -> dict[str, float]:
        found = cluster.instance("prefill-0")["load"]["traffic"]
        return {t["peer"]: t["written_bytes"] / t["written_s"] for t in found if t["written_s"]}

    cluster.wait_for("what was written", lambda: {decode, "store-0"} <= written().keys())
    assert all(0 < rate < 1e12 for rate in written().values())

    def steps() -> dict[str, Any]:
        return cluster.instance(decode)["load"]["steps"]

    # The number of steps is not enough, because it includes steps of earlier requests.
    cluster.wait_for("the decode worker's steps", lambda: steps()["context_tokens"] >= 49 * 3_000)
    assert 0 < steps()["seconds"] / steps()["num_steps"] < PATIENCE_S
    assert min(steps()["num_steps"], steps()["sequences"]) >= 49
    store = cluster.instance("store-0")["load"]
    assert 0 < store["free_bytes"] < store["capacity_bytes"]


# Commands


def test_top_shows_the_cluster_live_until_it_is_interrupted(cluster: Cluster) -> None:
    prompt = "the same beginning of every prompt, again and again " * 8
    for _ in range(2):
        cluster.complete(prompt, max_tokens=8, ignore_eos=True)
    with terminal((*COMMAND, "top", "--url", cluster.url, "--interval", "0.2")) as top:
        top.wait_for("ready")
        for shown in ("TTFT", "p95", "TBT", "prefix hits"):
            top.wait_for(shown)
        # One screen may arrive in pieces; the next one is complete again.
        for shown in ("decode-0", "prefill-0", "store-0", "prefilling 0", "hot prefix"):
            top.wait_for(shown)
        top.wait_for(r"throughput +\d")  # needs two samples
        top.type("\x03")
        assert top.ended() == 0
    assert "Traceback" not in top.text


def test_a_trace_is_replayed_and_reported(cluster: Cluster, tmp_path: Path) -> None:
    records = [
        {"timestamp": 500 * n, "input_length": 512 * (n + 2), "output_length": 16,
         "hash_ids": list(range(10**6, 10**6 + n + 2))}  # no other trace has these
        for n in range(5)
    ]  # fmt: skip
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    scales = ("--scale-lengths", "0.0625", "--scale-outputs", "0.25")
    command = (*COMMAND, "replay", str(trace), "--url", cluster.url, "--output", str(report))
    done = subprocess.run((*command, *scales), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hit ratio" in done.stdout
    found = json.loads(report.read_text())
    assert (found["completed"], found["failed"], found["rejected"]) == (5, 0, 0)
    assert found["total_output_tokens"] == 20
    assert 0 <= found["hit_ratio"] <= found["ideal_hit_ratio"]
    assert found["ideal_hit_ratio"] > 0.6


# Logs


def records(cluster: Cluster, process: str) -> list[dict[str, Any]]:
    """Returns all lines of a process's log, each of which must be a JSON object."""
    text = (cluster.log_dir / f"{process}.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


def about(cluster: Cluster, process: str, known_id: str) -> list[str]:
    """Returns the messages about a request, given the id that the client knows."""
    found = (record for record in records(cluster, process) if "request_id" in record)
    return [each["message"] for each in found if each["request_id"].startswith(known_id)]


def test_a_request_is_followed_by_its_id_through_every_process(cluster: Cluster) -> None:
    wish = {"prompt": [7] * 100, "max_tokens": 5}
    decode = post(cluster, wish, **{"x-request-id": "follow-me"}).headers["x-decode-instance-id"]
    expected = {
        "conductor": [f"placed: prefill-0, then {decode}"],
        "prefill-0": ["accepted: 100 tokens", "first token: 0 tokens cached", "handed over to dec"],
        decode: ["landed:", "ended with token 4: length"],
        "gateway-0": ["finished: length; 100 prompt tokens, 0 of them cached, 5 generated; TTFT "],
    }
    for process, beginnings in expected.items():
        cluster.wait_for(
            f"the lines of {process}", lambda p=process, b=beginnings: len(about(cluster, p, "follow-me")) >= len(b)
        )
        messages = about(cluster, process, "follow-me")
        for message, beginning in zip(messages, beginnings, strict=False):
            assert message.startswith(beginning), messages
    [end] = [
        r
        for r in records(cluster, "gateway-0")
        if r["logger"] == "moonserve.gateway.generation.request_log" and "follow-me" in r["request_id"]
    ]
    assert re.fullmatch(r"follow-me-[0-9a-f]{8}", end["request_id"])
    assert (end["prefill"], end["decode"]) == ("prefill-0", decode)
    assert 0 < end["ttft_s"] <= end["e2e_s"]


def test_log_lines_have_request_ids_as_fields(cluster: Cluster) -> None:
    """A request id in a message is always a field too, so that logs can be filtered by it."""
    for process in ("conductor", "prefill-0", *DECODES, "gateway-0"):
        for record in records(cluster, process):
            if re.search(r"\b(?:req-[0-9a-f]+|follow-me)", record["message"]):
                assert "request_id" in record, record


def test_a_killed_worker_is_logged_once_by_launcher_and_gateway(cluster: Cluster) -> None:
    """Retries with another stream, because on a busy machine it may end before the kill."""
    names = (f"survivor-{number}" for number in range(TRIES))
    name, killed = next((name, k) for name in names if (k := killed_under(cluster, name)))
    deaths = [json.loads(line) for line in cluster.output.splitlines() if '"exit_code"' in line]
    assert {(death["exit_code"], death["level"]) for death in deaths} == {(-9, "error")}
    assert deaths[-1]["child"] == killed
    assert re.match(r"decode-\d was killed by SIGKILL.*; it is started", deaths[-1]["message"])
    warnings = [r["message"] for r in records(cluster, "gateway-0") if r["level"] == "warning"]
    [lost] = [message for message in warnings if "1 of its requests" in message]
    assert f"{killed} is lost" in lost
    cluster.wait_for("its end", lambda: len(about(cluster, "gateway-0", name)) >= 2)
    again, end = about(cluster, "gateway-0", name)
    assert again.startswith("continues on other workers, attempt 2")
    assert end.startswith("finished: length; 40 prompt tokens")


def killed_under(cluster: Cluster, name: str) -> str | None:
    """Returns the worker that was killed while it decoded a stream of this name, or None if it had ended before."""
    kills = {worker: cluster.killer(worker) for worker in DECODES}
    epochs: dict[str, int] = {}

    def on_tokens(count: int) -> None:
        if count >= 20 and not epochs:
            worker = cluster.decisions(name)[0]["decode"]
            epochs[worker] = kills[worker]()

    with cluster.client() as client:
        client.headers["x-request-id"] = name
        body = {"prompt": [9] * 40, "max_tokens": 1_000, **GREEDY}
        assert len(read_choice(client, body, on_tokens).token_ids) == 1_000
    [(worker, epoch)] = epochs.items()
    cluster.wait_for("its successor", lambda: cluster.epoch(worker) > epoch)
    return worker if len(cluster.decisions(name)) > 1 else None
