"""A killed decode worker that prefills costs only time. test_parameter_matrix.py checks the tokens of such workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import Cluster, prompt_of
from tests.e2e.reference import continuations, load_reference, num_ties

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 32
FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "64MiB"),
    *("--max-num-batched-tokens", "64", "--ttft-slo", "10000", "--num-threads", "1"),
    *("--conditional-disaggregation", "on", "--admission", "none", "--store-reads", "always"),
    # Queues have to last: first come, first served, and the slowest kernels.
    *("--placement-policy", "global-cache-aware", "--kernels", "torch"),
)
# No decode worker meets this objective next to a chunk, so such requests go to a prefill worker.
APART = {"x-slo-tbt-ms": "0.001"}
CONTEXT = 16_384
NUM_TOKENS = 12
LONG = 6_000
ATTEMPTS = 6


@contextmanager
def busy_prefill(cluster: Cluster, name: str) -> Iterator[None]:
    """Keeps long prompts queued at the only prefill worker."""
    over = threading.Event()

    def keep_asking(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            prompt = prompt_of(f"{name} {number} {count}", LONG)
            with cluster.client() as client:
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
                response = client.post("/v1/completions", json=body, headers=APART)
                assert response.status_code == 200, response.text

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(keep_asking, number) for number in range(3)]
        try:
            cluster.wait_for("a queue", lambda: cluster.status("prefill-0").load.queued_tokens > LONG)
            yield
        finally:
            over.set()
    for each in asked:
        each.result()


def test_a_prompt_continues_elsewhere_when_its_local_prefill_worker_is_killed(cluster: Cluster) -> None:
    """Retries until the kill comes in the middle of the prompt, which a busy machine may have computed already."""
    assert any(killed_in_the_middle(cluster, n) for n in range(ATTEMPTS)), cluster.logs()


def killed_in_the_middle(cluster: Cluster, number: int) -> bool:
    prompt = prompt_of(f"middle {number}", 3_000)

    def is_read() -> bool:
        return cluster.status("decode-0").load.queued_tokens > 1

    with busy_prefill(cluster, f"middle {number}"), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.greedy, prompt, NUM_TOKENS, logprobs=0)
        cluster.wait_for("the prompt at work", lambda: is_read() or asked.done())
        was_caught = not asked.done()
        epoch = cluster.kill("decode-0")
        answer = asked.result()
        cluster.wait_for("its successor", lambda: cluster.epoch("decode-0") > epoch)
    [truth] = continuations(load_reference(cluster.model), [prompt], NUM_TOKENS)
    assert num_ties(answer, truth) <= 1
    return was_caught
