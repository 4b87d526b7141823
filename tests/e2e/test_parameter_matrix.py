"""Every parameter in two clusters: separate prefill and decode, and one worker that does both. Tokens, text and
log-probabilities (except for the last bits of float32) are equal, also next to other requests: output depends on the
seed, not on the batch or the cache. With separate workers, prefill samples the first token and decode all others, so
that all state that depends on the history, the index, the text or the seed must be carried over.
"""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.e2e.cluster import UNHURRIED, Cluster, running_cluster
from tests.e2e.load import BackgroundLoad, object_schema
from tests.random_models import make_model

BLOCK_SIZE = 16
FLAGS = (
    *(*UNHURRIED, "--block-size", str(BLOCK_SIZE)),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "48"),
    *("--tool-call-parser", "hermes"),
)
CROWDS = (1, 2, 8, 32, 128)  # numbers of concurrent requests
LOGPROB_TOLERANCE = 1e-4  # chunks of other sizes differ in the last bits
_CALL_ID = re.compile("call_[0-9a-f]{24}")
TOGETHER = ("--conditional-disaggregation", "on", "--admission", "none")
PROMPT = random.Random(5).choices(range(256), k=75)
OTHER = random.Random(6).choices(range(256), k=20)
COMPLETIONS_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"

PLACE = object_schema(
    name={"type": "string", "maxLength": 6},
    kind={"enum": ["host", "device", "Gerät"]},
    blocks={"type": "integer", "minimum": 0, "maximum": 9999},
    pinned={"type": "boolean"},
)

# Parameters in addition to BASE. Sampling is seeded, so that every token is determined.
BASE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 11}
# Tokens are bytes here; this text consists of letters, each of which is one token.
ALPHABET = {str(ord(letter)): 60.0 for letter in "abcdefghijklmnopqrstuvwxy"}
LETTERS = {"logit_bias": {str(ord(letter)): 60.0 for letter in "abcd"}}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "a large seed": {**DRAWN, "seed": 2**63},
    "top_p, top_k and min_p": {**DRAWN, "top_p": 0.8, "top_k": 40, "min_p": 0.005},
    "all penalties, drawn": {**DRAWN, "presence_penalty": -0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"17": 100.0}, "presence_penalty": 2.0},
    "several prompts": {"prompt": [PROMPT, OTHER, PROMPT], **DRAWN},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": list(range(0, 256, 2))},
    "eos": {**DRAWN, "ignore_eos": False, "logit_bias": {"0": 8.0, "1": 8.0, "2": 8.0}},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 33},
    "cache_salt": {"cache_salt": "pepper"},
    "priority and user": {"priority": -3, "user": "alice"},
    "echo with logprobs of several": {**DRAWN, "prompt": [PROMPT, OTHER], "n": 2, "echo": True, "logprobs": 1},
    "bad_words": {**DRAWN, **LETTERS, "bad_words": ["b", "ca", "add"]},
    "include_stop_str_in_output": {**LETTERS, "stop": ["a"], "include_stop_str_in_output": True},
    "a stop token in the text": {
        "stop_token_ids": list(range(0, 256, 3)),
        "include_stop_str_in_output": True,
        "min_tokens": 3,
    },
    "guided_regex": {**DRAWN, "ignore_eos": False, "guided_regex": "[a-c]{3,5}x?"},
    "a form beside other parameters": {
        **{"ignore_eos": False, "max_tokens": 200, "min_tokens": 190, "seed": 7, "logprobs": 2},
        **{"presence_penalty": 1.5, "n": 2, "stop": ["zz"]},
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": PLACE}},
    },
    "prompt_logprobs of several": {**DRAWN, "prompt": [PROMPT, OTHER], "n": 2, "prompt_logprobs": 0},
}
SCHEMA = object_schema(kind={"enum": ["host", "device"]})
TOOL = {"type": "function", "function": {"name": "place", "parameters": SCHEMA}}
CHAT_BASE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How are you?"}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}
TO_STOP = {
    path: {**base, **DRAWN, "logit_bias": ALPHABET, "return_token_ids": True}
    for path, base in ((COMPLETIONS_PATH, BASE), (CHAT_PATH, CHAT_BASE))
}
FORMED: dict[str, Any] = {**DRAWN, "ignore_eos": False, "max_tokens": 120}
CHATS: dict[str, dict[str, Any]] = {
    "a system prompt": {"messages": [{"role": "system", "content": "Be brief."}, *CHAT_BASE["messages"]]},
    "top_logprobs": {**DRAWN, "logprobs": True, "top_logprobs": 4},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "continue_final_message": {
        "messages": [*CHAT_BASE["messages"], {"role": "assistant", "content": "I am"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "json_object": {**FORMED, "response_format": {"type": "json_object"}, "max_tokens": 30},
    "json_schema with n and logprobs": {
        **FORMED,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
    },
    "a tool that must be called, n": {**FORMED, "tools": [TOOL], "tool_choice": "required", "n": 2},
    "a tool that may be called": {**FORMED, "tools": [TOOL], "max_tokens": 12, "logprobs": True},
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """Two clusters: with separate workers, and with prefill and decode in one worker."""
    folder = tmp_path_factory.mktemp("matrix")
    make_model("llama", folder / "model")
    with (
        running_cluster(folder / "model", folder / "apart", *FLAGS) as apart,
        running_cluster(folder / "model", folder / "together", *FLAGS, *TOGETHER) as together,
    ):
        yield apart, together


def ask(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Returns the answer and the names of its prefill and decode workers."""
    with cluster.client() as client:
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        names = [reply.headers[f"x-{role}-instance-id"] for role in ("prefill", "decode")]
        return reply.json(), names[0], names[1]


def ask_apart(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer that was handed off."""
    answer, *workers = ask(cluster, path, body)
    assert workers == ["prefill-0", "decode-0"]
    return answer


def ask_whole(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer without a handoff. The conductor chooses the decode worker if it is predicted to be sooner,
    which is so once enough requests queue for the prefill worker, however slow decode is measured to be.
    """
    for crowd in CROWDS:
        with ThreadPoolExecutor(crowd) as threads:
            replies = list(threads.map(lambda _: ask(cluster, path, body), range(crowd)))
        for answer, *workers in replies:
            if workers == ["decode-0", "decode-0"]:
                return answer
    raise AssertionError("every prompt was handed off")


def same(choice: dict[str, Any]) -> dict[str, Any]:
    """Removes the ids of calls, which are random per reply, and the difference between null and empty text."""
    message = choice.get("message")
    if message is None:
        return choice
    calls = [{**call, "id": _CALL_ID.sub("call", call["id"])} for call in message.get("tool_calls", [])]
    return {**choice, "message": {**message, "content": message["content"] or "", "tool_calls": calls}}


def assert_close(one: Any, other: Any, where: str = "") -> None:
    """Compares values except for the last bits of numbers. Ranks of equally likely tokens may differ by one."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name, value in one.items():
            if name == "rank":
                assert abs(value - other[name]) <= 1, where
            else:
                assert_close(value, other[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_close(mine, theirs, f"{where}[{at}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, abs=LOGPROB_TOLERANCE), where
    else:
        assert one == other, where


def check(clusters: tuple[Cluster, Cluster], path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the choices, after checking that they are the same in both clusters."""
    apart = ask_apart(clusters[0], path, body)
    together = ask_whole(clusters[1], path, body)
    choices = [same(choice) for choice in apart["choices"]]
    assert_close(choices, [same(choice) for choice in together["choices"]])
    for name in ("prompt_tokens", "completion_tokens"):
        assert apart["usage"][name] == together["usage"][name]
    return choices


EVERY = {
    **{(COMPLETIONS_PATH, name): {**BASE, **body} for name, body in COMPLETIONS.items()},
    **{(CHAT_PATH, name): {**CHAT_BASE, **body} for name, body in CHATS.items()},
}


@pytest.mark.parametrize(("path", "name"), EVERY)
def test_parameter_has_same_effect_alone_and_combined(clusters: tuple[Cluster, Cluster], path: str, name: str) -> None:
    body = EVERY[path, name]
    choices = check(clusters, path, {**body, "return_token_ids": True})
    if body.get("tool_choice"):
        for choice in choices:
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "place"
    if form := body.get("response_format", {}).get("json_schema"):
        for choice in choices:
            jsonschema.validate(json.loads(text_of(choice)), form["schema"])


def test_every_parameter_has_the_same_effect_beside_other_requests(clusters: tuple[Cluster, Cluster]) -> None:
    """All requests run concurrently, with different other requests in each batch."""

    def ask_all(num_threads: int) -> list[Any]:
        with ThreadPoolExecutor(num_threads) as pool:
            replies = pool.map(lambda at: ask_apart(clusters[0], at[0], EVERY[at]), EVERY)
            return [[same(choice) for choice in reply["choices"]] for reply in replies]

    alone = ask_all(1)
    with BackgroundLoad(clusters[0], 256, streams=7):
        assert_close(ask_all(len(EVERY)), alone)


@pytest.fixture(scope="module")
def unstopped(clusters: tuple[Cluster, Cluster]) -> dict[str, str]:
    """Texts of a completion and a chat without stop strings."""
    texts = {path: text_of(ask_apart(clusters[0], path, body)["choices"][0]) for path, body in TO_STOP.items()}
    assert [len(text) for text in texts.values()] == [12, 12]
    return texts


@pytest.mark.parametrize("path", TO_STOP)
@pytest.mark.parametrize(("span", "includes"), [((0, 1), True), ((0, 2), False), ((1, 4), True)], ids=str)
def test_a_stop_string_ends_the_text_on_any_worker(
    clusters: tuple[Cluster, Cluster], unstopped: dict[str, str], path: str, span: tuple[int, int], includes: bool
) -> None:
    """Each character is a token. Prefill makes the first, so that the second span crosses the handoff."""
    text = unstopped[path]
    stop = text[slice(*span)]
    start = text.index(stop)
    logprobs = {"logprobs": True} if path == CHAT_PATH else {"logprobs": 1}
    stops = {"stop": ["zz", stop], "include_stop_str_in_output": includes}
    [choice] = check(clusters, path, {**TO_STOP[path], **stops, **logprobs})
    assert text_of(choice) == text[: start + len(stop) * includes]
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == start + len(stop)


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]
