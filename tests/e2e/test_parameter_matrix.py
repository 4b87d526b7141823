"""Every parameter both ways: prefill and decode apart, and one worker that does both. Same tokens, same text, same
log-probabilities (to the last bits of float32), whole and streamed.

The first token is sampled by the prefill worker and all others by the decode worker where these are apart, so that
whatever depends on the history, the index or the seed must be carried over.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import UNHURRIED, Cluster, running_cluster
from tests.e2e.sse import read_stream
from tests.random_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    *(*UNHURRIED, "--block-size", "16"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "48"),
)
TOGETHER = ("--conditional-disaggregation", "on", "--admission", "none")
PROMPT = random.Random(5).choices(range(256), k=75)
OTHER = random.Random(6).choices(range(256), k=20)
ATTEMPTS = 8
LOGPROB_TOLERANCE = 1e-4  # chunks of other sizes differ in the last bits

# Parameters on top of BASE. What is random is seeded: then every token is determined.
BASE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 11}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "seed": DRAWN,
    "another seed": {**DRAWN, "seed": 2**63},
    "a high temperature": {**DRAWN, "temperature": 3.0},
    "top_p": {**DRAWN, "top_p": 0.5},
    "top_k": {**DRAWN, "top_k": 5},
    "min_p": {**DRAWN, "min_p": 0.3},
    "top_p, top_k and min_p": {**DRAWN, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "all penalties, drawn": {
        **DRAWN,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "logit_bias": {"logit_bias": {"17": 100.0}, "presence_penalty": 2.0},
    "logprobs": {"logprobs": 5},
    "n": {**DRAWN, "n": 3},
    "several prompts": {"prompt": [PROMPT, OTHER, PROMPT], **DRAWN},
    "a text": {"prompt": "to be or not to be"},
    "echo": {"prompt": "to be or not", "echo": True},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": list(range(0, 256, 2))},
    "stop_token_ids": {"stop_token_ids": list(range(0, 256, 3))},
    "eos": {**DRAWN, "ignore_eos": False, "logit_bias": {"0": 8.0, "1": 8.0, "2": 8.0}},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 33},
    "cache_salt": {"cache_salt": "pepper"},
    "priority and user": {"priority": -3, "user": "alice"},
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """Apart, and together."""
    folder = tmp_path_factory.mktemp("matrix")
    make_model("llama", folder / "model")
    with (
        running_cluster(folder / "model", folder / "apart", *FLAGS) as apart,
        running_cluster(folder / "model", folder / "together", *FLAGS, *TOGETHER) as together,
    ):
        yield apart, together


def ask(cluster: Cluster, change: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The answer, and who prefilled and decoded."""
    body = {**BASE, "return_token_ids": True, **change}
    with cluster.client() as client:
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        names = [reply.headers[f"x-{role}-instance-id"] for role in ("prefill", "decode")]
        return reply.json(), names[0], names[1]


def ask_whole(cluster: Cluster, change: dict[str, Any]) -> dict[str, Any]:
    """An answer of which nothing was handed off; the conductor chooses that where it seems sooner."""
    for _ in range(ATTEMPTS):
        answer, *workers = ask(cluster, change)
        if workers == ["decode-0", "decode-0"]:
            return answer
    raise AssertionError("every prompt was handed off")


def streamed(cluster: Cluster, change: dict[str, Any]) -> list[tuple[str, list[int], str]]:
    """Text, tokens and finish reason of each choice, put together from chunks."""
    body = {**BASE, "return_token_ids": True, "stream": True, **change}
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    with cluster.client() as client:
        for chunk in read_stream(client, "/v1/completions", body):
            for choice in chunk["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                tokens.setdefault(index, []).extend(choice["token_ids"])
                reasons[index] = choice["finish_reason"] or reasons.get(index, "")
    return [(texts[index], tokens[index], reasons[index]) for index in sorted(texts)]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_parameter_does_the_same_apart_and_together(
    clusters: tuple[Cluster, Cluster], name: str
) -> None:
    change = COMPLETIONS[name]
    apart, *workers = ask(clusters[0], change)
    assert workers == ["prefill-0", "decode-0"]
    together = ask_whole(clusters[1], change)
    for one, other in zip(apart["choices"], together["choices"], strict=True):
        close = [one.pop("logprobs"), other.pop("logprobs")]
        assert one == other
        if close[0] is not None:
            assert_close(*close)
    assert apart["usage"]["completion_tokens"] == together["usage"]["completion_tokens"]
    whole = [(c["text"], c["token_ids"], c["finish_reason"]) for c in apart["choices"]]
    assert streamed(clusters[0], change) == whole


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["tokens"] == other["tokens"]
    assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=LOGPROB_TOLERANCE)
    for mine, theirs in zip(one["top_logprobs"], other["top_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)
