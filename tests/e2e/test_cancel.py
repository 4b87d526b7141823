"""A client that leaves frees everything it had, everywhere, in whatever phase its request is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.cluster import Cluster, prompt_of, small_cluster
from tests.e2e.raw_http import RawClient

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 16_384
LONG = 16_000
"""Tokens of a prompt that takes seconds in steps of 64."""

FLAGS = (
    *("--dtype", "float32", "--block-size", "32", "--kv-cache-memory", "32MiB"),
    *("--max-num-batched-tokens", "64", "--ttft-slo", "10000", "--num-threads", "1"),
    *("--kernels", "torch"),  # slow: every phase has to last until it is noticed
)
BLOCK_SIZE = 32
NUM_BLOCKS = 2_048
"""In a pool of that size."""
TOO_MANY_BLOCKS = 2_000
"""Leave no room for a long prompt."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cancel")
    with small_cluster(folder, *FLAGS, context=MAX_MODEL_LEN) as started:
        assert started.status("decode-0").num_blocks == NUM_BLOCKS
        yield started
        assert not started.tracebacks(), started.logs()


@pytest.fixture(autouse=True)
def _is_idle_again_and_serves(cluster: Cluster) -> Iterator[None]:
    cluster.wait_until_all_is_free()
    yield
    cluster.wait_until_all_is_free()
    answer = cluster.complete([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5


def long_prompt(name: str) -> list[int]:
    """A different one for each name, so that nothing of it is cached."""
    return prompt_of(name, LONG)


def wait_for_count(cluster: Cluster, name: str, at_least: int) -> None:
    cluster.wait_for(name, lambda: cluster.counter("prefill-0", name) >= at_least)


def test_while_queued(cluster: Cluster) -> None:
    """None is handed off, and so none begun, while the decode worker has no room: the line stays."""
    with cluster.landing("decode-0", TOO_MANY_BLOCKS, BLOCK_SIZE) as landing, ExitStack() as clients:
        for index in range(12):
            client = clients.enter_context(RawClient(cluster))
            client.ask(long_prompt(f"queued {index}"), max_tokens=100)
        # More than four are not prepared ahead, so the last ones have neither blocks nor landings.
        cluster.wait_for("a queue", lambda: landing.renew() or waiting(cluster) > 5)
    # They left in reverse order, the last one first.
    wait_for_count(cluster, "cancelled_queued", 1)


def waiting(cluster: Cluster) -> int:
    return cluster.status("prefill-0").load.num_waiting


def test_while_its_prompt_is_computed(cluster: Cluster) -> None:
    """On a busy machine the client may leave when all is computed: then another one is tried."""
    assert any(left_while_running(cluster, attempt) for attempt in range(10))


def left_while_running(cluster: Cluster, attempt: int) -> bool:
    """False: its prompt was computed already."""
    before, handed_off = (cluster.counter("prefill-0", name) for name in ("cancelled_running", "handed_off_requests"))

    def runs_or_ran() -> bool:
        status = cluster.status("prefill-0")
        return status.load.num_running == 1 or status.counters["handed_off_requests"] > handed_off

    with RawClient(cluster) as client:
        client.ask(long_prompt(f"prefill {attempt}"), max_tokens=100)
        cluster.wait_for("its run", runs_or_ran)
    cluster.wait_until_all_is_free()
    return cluster.counter("prefill-0", "cancelled_running") > before


def test_while_the_decode_worker_cannot_grant_a_landing(cluster: Cluster) -> None:
    with cluster.landing("decode-0", TOO_MANY_BLOCKS, BLOCK_SIZE) as landing:
        with RawClient(cluster) as client:
            client.ask(long_prompt("reserving"), max_tokens=100)
            cluster.wait_for("its blocks", lambda: landing.renew() or cluster.status("prefill-0").load.held_blocks > 0)
        wait_for_count(cluster, "cancelled_reserving", 1)


def test_while_a_whole_reply_is_made(cluster: Cluster) -> None:
    dropped = cluster.counter("decode-0", "requests_dropped")
    with RawClient(cluster) as client:
        client.ask([8, 9], max_tokens=MAX_MODEL_LEN - 2, stream=False, n=3)
        cluster.wait_for("choices", lambda: cluster.status("decode-0").load.num_running == 3)
    cluster.wait_for("the end", lambda: cluster.counter("decode-0", "requests_dropped") == dropped + 3)


def test_twenty_at_once_in_any_phase(cluster: Cluster) -> None:
    dice = random.Random(1)
    clients = [RawClient(cluster) for _ in range(20)]
    for index, client in enumerate(clients):
        prompt = long_prompt(f"any {index}")[: dice.choice((3, 40, 500, 3_000))]
        client.ask(prompt, max_tokens=dice.choice((1, 20, 1_000)))
    cluster.wait_for("tokens", lambda: cluster.status("decode-0").load.num_running > 0)
    for client in dice.sample(clients, len(clients)):
        client.leave()
