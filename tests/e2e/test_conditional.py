"""A decode worker that prefills: the tokens are those of transformers, with a prefix from its device, from a store or
without one, and its death costs time and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import GREEDY, Cluster, prompt_of, small_cluster
from tests.e2e.reference import Continuation, continuations, load_reference, num_ties

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 32
FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "64MiB"),
    *("--max-num-batched-tokens", "64", "--ttft-slo", "10000", "--num-threads", "1"),
    *("--conditional-disaggregation", "on", "--admission", "none", "--store-reads", "always"),
    # Queues have to last: in order of arrival, and computed as slowly as can be.
    *("--placement-policy", "global-cache-aware", "--kernels", "torch"),
)
# No decode worker keeps to it beside a chunk, so that who asks for it is prefilled by a prefill worker.
APART = {"x-slo-tbt-ms": "0.001"}
NUM_TOKENS = 12
LONG = 6_000
ATTEMPTS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with small_cluster(tmp_path_factory.mktemp("model"), *FLAGS, context=16_384) as started:
        yield started


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    return cluster.log_dir.parent / "model"


def ask(cluster: Cluster, prompt: list[int]) -> tuple[dict[str, Any], str]:
    """The answer, and who prefilled."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "logprobs": 0, **GREEDY}
    with cluster.client() as client:
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json(), response.headers["x-prefill-instance-id"]


@contextmanager
def busy_prefill(cluster: Cluster, name: str) -> Iterator[None]:
    """Long prompts are queued at the only prefill worker meanwhile."""
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


def read_by_decode(cluster: Cluster, prompt: list[int]) -> dict[str, Any] | None:
    answer, prefilled_by = ask(cluster, prompt)
    return answer if prefilled_by == "decode-0" else None


def expected(model: Path, prompts: list[list[int]]) -> list[Continuation]:
    return continuations(load_reference(model), prompts, NUM_TOKENS)


def test_a_short_prompt_behind_long_ones_is_read_by_the_decode_worker(cluster: Cluster, model: Path) -> None:
    """A prompt of another beginning each time, until one is: the queue may have ended just then."""
    prompts = [prompt_of(f"short {number}", 100) for number in range(ATTEMPTS)]
    with busy_prefill(cluster, "short"):
        answers = [read_by_decode(cluster, prompt) for prompt in prompts]
    known = as_expected(cluster, model, prompts, answers)
    assert cluster.counters("decode-0")["prompt_tokens"] > 0
    [decision] = cluster.decisions(known[-1]["id"])
    assert decision["is_undivided"]
    [row] = decision["undivided_candidates"]
    assert row["instance_id"] == "decode-0"
    assert row["keeps_slo"]
    assert row["ttft_s"] < next(each["ttft_s"] for each in decision["prefill_candidates"])


def as_expected(
    cluster: Cluster, model: Path, prompts: list[list[int]], answers: list[dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """The answers of those that the decode worker read: some, with the right tokens."""
    pairs = zip(answers, expected(model, prompts), strict=True)
    known = [(answer, truth) for answer, truth in pairs if answer is not None]
    assert known, cluster.logs()
    assert sum(num_ties(*pair) for pair in known) <= 1
    return [answer for answer, _ in known]


def test_a_prompt_goes_on_elsewhere_when_the_worker_that_reads_it_is_killed(cluster: Cluster, model: Path) -> None:
    """Tried until the kill comes in the middle of the prompt: on a busy machine it may be read by then."""
    assert any(killed_in_the_middle(cluster, model, n) for n in range(ATTEMPTS)), cluster.logs()


def killed_in_the_middle(cluster: Cluster, model: Path, number: int) -> bool:
    prompt = prompt_of(f"middle {number}", 3_000)

    def is_read() -> bool:
        return cluster.status("decode-0").load.queued_tokens > 1

    with busy_prefill(cluster, f"middle {number}"), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, cluster, prompt)
        cluster.wait_for("the prompt at work", lambda: is_read() or asked.done())
        was_caught = not asked.done()
        epoch = cluster.kill("decode-0")
        answer, _ = asked.result()
        cluster.wait_for("its successor", lambda: cluster.epoch("decode-0") > epoch)
    [truth] = expected(model, [prompt])
    assert num_ties(answer, truth) <= 1
    return was_caught
