"""With one process of each kind, all are replaced under continuous requests and none fails. A client of a killed
gateway can resume its stream."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from moonserve.gateway.http.stream_resumption import parse_event_id
from tests.e2e.cluster import GREEDY, UNHURRIED, Cluster, prompt_of, tokens_of
from tests.e2e.load import Regulars
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

FLAGS = (*UNHURRIED, "--worker-patience-s", str(PATIENCE_S), "--kv-cache-memory", "32MiB")
CONTEXT = 4_096
ANSWER, LONG = 12, 1_500  # tokens
TRIES = 5


def test_every_process_is_replaced_under_load_and_no_request_fails(cluster: Cluster) -> None:
    before = cluster.pids()
    epochs = {each["instance_id"]: each["epoch"] for each in cluster.instances()}
    prompts = [prompt_of(f"rolling {number}", 40) for number in range(3)]
    with Regulars(cluster, prompts, ANSWER, num_streamed=LONG) as clients:
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for("the end", lambda: has_ended(cluster), 3 * PATIENCE_S)
    assert "every process was restarted" in cluster.output
    assert clients.begun_and_done
    after = cluster.pids()
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    cluster.wait_for("all members", lambda: all(cluster.epoch(name) > epoch for name, epoch in epochs.items()))
    cluster.wait_for("the old gateway's end", lambda: not psutil.pid_exists(before["gateway-0"]))


def has_ended(cluster: Cluster) -> bool:
    return "every process was restarted" in cluster.output or "the rolling restart ended early" in cluster.output


class Stream:
    """Streamed request that keeps the ids of its events."""

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        self._cluster = cluster
        self._body = {**body, "stream": True, "stream_options": {"include_event_ids": True}}
        self.token_ids: list[int] = []
        self.names: set[str] = set()
        self.last_id = ""

    def read(self, num_tokens: int | None = None) -> None:
        """Reads on from the last event, to the end. With `num_tokens`, kills the gateway after this many tokens."""
        headers = {"Last-Event-ID": self.last_id} if self.last_id else {}
        with (
            self._cluster.client() as client,
            client.stream("POST", "/v1/completions", json=self._body, headers=headers) as reply,
        ):
            assert reply.status_code == 200, reply.read()
            pid = self._cluster.pids()["gateway-0"]
            for line in reply.iter_lines():
                self._take(line)
                if num_tokens is not None and len(self.token_ids) >= num_tokens:
                    os.kill(pid, signal.SIGKILL)
                    num_tokens = None

    def _take(self, line: str) -> None:
        field, _, value = line.partition(": ")
        if field == "id":
            self.last_id = value
        elif field == "data" and value != "[DONE]":
            chunk = json.loads(value)
            self.names.add(chunk["id"])
            self.token_ids += chunk["choices"][0].get("token_ids") or ()


def test_a_client_of_a_killed_gateway_continues_its_stream(cluster: Cluster) -> None:
    """The connection breaks, which is distinct from an end. The next one waits for the gateway's successor, which draws
    the same tokens without a seed from the client. Retries, because on a busy machine the whole answer may be in the
    connection before the kill."""
    body = {**GREEDY, "prompt": list(range(60)), "max_tokens": LONG, "temperature": 1.0}
    streams = (Stream(cluster, body) for _ in range(TRIES))
    stream = next(each for each in streams if is_broken_off(each))
    assert 20 <= len(stream.token_ids) < LONG
    stream.read()
    assert len(stream.names) == 1
    whole = cluster.complete(**body, seed=parse_event_id(stream.last_id).seed)
    assert stream.token_ids == tokens_of(whole)


def is_broken_off(stream: Stream) -> bool:
    """Returns True if the gateway's death broke the stream before its last token."""
    try:
        stream.read(num_tokens=20)
    except httpx.TransportError:
        return len(stream.token_ids) < LONG
    return False
