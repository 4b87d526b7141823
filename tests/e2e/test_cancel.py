"""A client that leaves frees its resources everywhere. test_service.py of prefill_worker covers each prefill phase."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, prompt_of
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

CONTEXT = 16_384
LONG = 16_000
"""Length in tokens of a prompt that takes seconds in steps of 64."""
FLAGS = (
    *("--dtype", "float32", "--block-size", "32", "--kv-cache-memory", "32MiB"),
    *("--max-num-batched-tokens", "64", "--ttft-slo", "10000", "--num-threads", "1"),
    *("--kernels", "torch"),  # slow, so that every phase lasts long enough to be observed
)


@pytest.fixture(autouse=True)
def _is_idle_again_and_serves(cluster: Cluster) -> Iterator[None]:
    cluster.wait_until_all_is_free()
    yield
    cluster.wait_until_all_is_free()
    answer = cluster.complete([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5


def ask(cluster: Cluster, prompt: list[int], max_tokens: int, **parameters: object) -> socket.socket:
    """Sends a streamed completion request and returns its connection, from which nothing is read."""
    wish = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **parameters}
    body = json.dumps(wish).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", cluster.port), PATIENCE_S)
    connection.sendall(head.encode() + body)
    return connection


def test_a_cancel_during_prefill_frees_everything(cluster: Cluster) -> None:
    """Retries, because on a busy machine the client may leave only after its prompt is computed."""
    assert any(left_while_running(cluster, attempt) for attempt in range(10))


def left_while_running(cluster: Cluster, attempt: int) -> bool:
    """Returns False if the prompt was already computed when the client left."""
    before, handed_off = (cluster.counter("prefill-0", name) for name in ("cancelled_running", "handed_off_requests"))

    def runs_or_ran() -> bool:
        status = cluster.status("prefill-0")
        return status.load.num_running == 1 or status.counters["handed_off_requests"] > handed_off

    with ask(cluster, prompt_of(f"prefill {attempt}", LONG), 100):
        cluster.wait_for("its run", runs_or_ran)
    cluster.wait_until_all_is_free()
    return cluster.counter("prefill-0", "cancelled_running") > before


def test_a_cancel_of_a_whole_reply_frees_everything(cluster: Cluster) -> None:
    dropped = cluster.counter("decode-0", "requests_dropped")
    with ask(cluster, [8, 9], CONTEXT - 2, stream=False, n=3):
        cluster.wait_for("choices", lambda: cluster.status("decode-0").load.num_running == 3)
    cluster.wait_for("the end", lambda: cluster.counter("decode-0", "requests_dropped") == dropped + 3)


def test_twenty_cancels_in_any_phase_free_everything(cluster: Cluster) -> None:
    dice = random.Random(1)
    lengths = [dice.choice((3, 40, 500, 3_000)) for _ in range(20)]
    clients = [ask(cluster, prompt_of(n, length), dice.choice((1, 20, 1_000))) for n, length in enumerate(lengths)]
    cluster.wait_for("tokens", lambda: cluster.status("decode-0").load.num_running > 0)
    for client in dice.sample(clients, len(clients)):
        client.close()
