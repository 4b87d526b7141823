"""Every failure is an OpenAI error with the right status."""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from yarl import URL

from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import DeadlineExceeded, IntegrityError, MoonserveError
from moonserve.protocol.pb import common_pb2, conductor_pb2
from tests.gateway.conftest import CHAT, CHAT_PATH, TEXT, TEXT_PATH, clients_of, post, refused
from tests.gateway.scripted_cluster import MAX_MODEL_LEN, ScriptedCluster, begins, failing

BODIES = (CHAT_PATH, TEXT_PATH, "/tokenize", "/detokenize")
MALFORMED = {
    "nothing": b"",
    "not JSON": b"{prompt: hello}",
    "cut off": b'{"prompt": "hel',
    "two documents": b'{"prompt": "a"} {"prompt": "b"}',
    "a list": b"[1, 2, 3]",
    "a string": b'"hello"',
    "null": b"null",
    "a number": b"1e999",
    "invalid UTF-8": b'{"prompt": "\xff\xfe\x80"}',
    "UTF-16": '{"prompt": "hello"}'.encode("utf-16"),
    "a lone surrogate": rb'{"prompt": "\ud800"}',
    "an integer of 10,000 digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}",
    "lists 100,000 deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects 100,000 deep": b'{"prompt": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "zeros": bytes(1_000),
}


async def test_malformed_bodies_get_400(http: aiohttp.ClientSession) -> None:
    for path, (name, raw) in itertools.product(BODIES, MALFORMED.items()):
        error = await refused(http, path, 400, data=raw)
        assert error["type"] == "invalid_request_error", name
        assert len(error["message"]) < 1_000


BAD_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, 1.5, "8", True, [], 2**31, 2**64, 10**30, MAX_MODEL_LEN),
    "min_tokens": (-1, 1.5, "8", 2**31, 7),
    "temperature": (-0.1, -1e308, 1e308, "1", [], True),
    "top_p": (0, -1, 1.0001, 1e308, "1"),
    "top_k": (-2, 1.5, 2**31, 2**100, "1"),
    "min_p": (-0.1, 1.1, "0"),
    "n": (0, -1, 129, 2**31, 2**100, 1.5, "1"),
    "seed": (-(2**63) - 1, 2**64, 1.5, "1"),
    "stop": ("", [""], [1], 7, ["x"] * 33, "x" * 1_001),
    "stop_token_ids": ([-1], [4096], [2**32], ["1"], "1", [1.5]),
    "presence_penalty": (-2.1, 2.1, "0"),
    "frequency_penalty": (-2.1, 2.1, 1e308),
    "repetition_penalty": (0, -1, 101, "1"),
    "logit_bias": ({"x": 1}, {"1": 101}, {"4096": 1}, {"-1": 1}, {"1": "a"}, [1], "1"),
    "logprobs": (-1, 21, 1.5, "1", 2**100),
    "stream": (1, "true", []),
    "stream_options": (1, "x", [], {"include_usage": 1}),
    "priority": (2**31, 1.5, "high"),
    "cache_salt": ("", 1, "x" * 1_025),
    "user": (1, []),
    "model": (1, []),
    "response_format": ({"type": "yaml"},),
}


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_invalid_parameters_get_400_and_are_named(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, path: str
) -> None:
    body = CHAT if path == CHAT_PATH else TEXT
    for name, values in BAD_PARAMETERS.items():
        for value in values if path == TEXT_PATH else values[:1]:
            error = await refused(http, path, 400, json=body | {name: value})
            assert error["type"] == "invalid_request_error"
            assert error["param"].startswith(name), (value, error)
            assert len(error["message"]) < 2_000
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        messages = '"prompt": "a", "messages": [{"role": "user", "content": "a"}]'
        raw = f'{{{messages}, "temperature": {number}}}'
        assert (await refused(http, path, 400, data=raw))["param"] == "temperature"
    assert cluster.places == []


def messages_of(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


NO_CONVERSATIONS = (
    *(None, [], {}, "hello", ["hello"], [{}], [{"content": "no role"}], [{"role": "user"}]),
    *(messages_of(content)["messages"] for content in (7, "x" * 1_000_000, [{"type": "image_url"}])),
    *(messages_of("x", role)["messages"] for role in ("", 7, "martian")),
    messages_of([{"type": "text", "text": 7}])["messages"],
    messages_of("x")["messages"] * 10_000,
)
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    *(({"messages": messages}, "messages") for messages in NO_CONVERSATIONS),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    (messages_of(5), "messages[0].content"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    ({"functions": [{}]}, "functions"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True, **messages_of(" ")}, "continue_final_message"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ messages[0].content }}"}, "chat_template"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
]
NO_PROMPTS: tuple[Any, ...] = (
    *(None, 7, True, {}, [], [[]], ["a", 1], [1, "a"], [[1], []], [1.5], [True]),
    *([-1], [4096], [2**31], [2**32], [2**64], [10**30], [[1], [4096]], {"a": 1}),
    *([1] * MAX_MODEL_LEN, [1] * 1_000_000, "x" * 1_000_000, ["x"] * 200),
)
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": prompt}, "prompt") for prompt in NO_PROMPTS),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 20, "prompt": [[5] * 300] * 128}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 20, "prompt": [5] * 300, "n": 128}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
]


@pytest.mark.parametrize(
    ("path", "body", "bad"),
    [(CHAT_PATH, CHAT, BAD_CHATS), (TEXT_PATH, TEXT, BAD_COMPLETIONS)],
    ids=["chats", "completions"],
)
async def test_unsupported_requests_get_400_and_name_the_parameter(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], bad: list[tuple[dict, str]]
) -> None:
    for change, param in bad:
        error = await refused(http, path, 400, json=body | change)
        assert error["param"].startswith(param), (str(change)[:200], error)


async def test_too_many_prompts_are_refused_before_tokenization(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    for change in ({"prompt": ["x"] * 129}, {"prompt": ["x"] * 65, "n": 2}):
        error = await refused(http, TEXT_PATH, 400, json=TEXT | change)
        assert "limit of 128 choices" in error["message"]


async def test_bug_gives_an_openai_error_without_details_and_is_logged(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", Mock(side_effect=ZeroDivisionError("inside")))
    error = await refused(http, TEXT_PATH, 500, json=TEXT)
    assert (error["type"], error["message"]) == ("internal_error", "internal error")
    assert [r.exc_info for r in caplog.records if f"POST {TEXT_PATH} failed" in r.getMessage()]


LONG_PROMPTS = ([5] * MAX_MODEL_LEN, "to be " * 100_000, "a b " * 500, "x" * 8_000_000)
CODES: list[tuple[int, dict[str, Any], str, str]] = [
    (400, {}, "prompt", "missing_required_parameter"),
    *((400, {"prompt": each}, "prompt", "context_length_exceeded") for each in LONG_PROMPTS),
    *(
        (404, TEXT | {"model": name}, "model", "model_not_found")
        for name in ("", "gpt-4", "x" * 10_000, "../../etc/passwd")
    ),
]


async def test_each_refusal_has_its_code(http: aiohttp.ClientSession) -> None:
    for status, body, param, code in CODES:
        error = await refused(http, TEXT_PATH, status, json=body)
        assert (error["param"], error["code"]) == (param, code)
        assert code != "context_length_exceeded" or str(MAX_MODEL_LEN) in error["message"]


async def test_unknown_parameters_and_content_types_are_ignored_with_one_warning(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="moonserve.gateway.openai.request_schema"):
        for kind in ("", "text/plain", "application/json; charset=latin-1", "x" * 1_000):
            raw, headers = json.dumps(TEXT | {"frobnicate": 1}), {"Content-Type": kind}
            async with http.post(TEXT_PATH, data=raw, headers=headers) as reply:
                assert reply.status == 200
    assert sum("frobnicate" in record.message for record in caplog.records) == 1


async def test_unknown_paths_get_404_wrong_methods_405_and_embeddings_400(http: aiohttp.ClientSession) -> None:
    for method, path, status in (
        ("GET", TEXT_PATH, 405),
        ("DELETE", CHAT_PATH, 405),
        ("PUT", "/tokenize", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("POST", "/v1/embeddings", 400),
        ("GET", "/nothing", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/v1/models/nothing", 404),
    ):
        async with http.request(method, URL(path, encoded=True)) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, reply.content_type) == (status, "application/json")
        assert set(error) >= {"message", "type", "param", "code"}
        if status == 405:
            assert reply.headers["allow"]
            assert error["code"] == "method_not_allowed"


async def test_bodies_over_the_limit_get_413_with_and_without_content_length(cluster: ScriptedCluster) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 1000

    async with clients_of(cluster, max_body_bytes=5_000) as http:
        for data in (b"x" * 20_000, pieces()):
            error = await refused(http, TEXT_PATH, 413, data=data)
            assert error["code"] == "request_too_large"


OVERLOADED = conductor_pb2.Overloaded(predicted_ttft_s=12.5, predicted_tbt_s=0.25, retry_after_s=3.2, reason="busy")
TOO_LONG = common_pb2.Failure(code="invalid_request", message="too long for any pool")


async def test_refusals_of_conductor_keep_their_status(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    cluster.place_replies = [
        conductor_pb2.PlaceReply(overloaded=OVERLOADED),
        conductor_pb2.PlaceReply(failure=TOO_LONG),
    ]
    async with http.post(TEXT_PATH, json=TEXT) as reply:
        assert (reply.status, reply.headers["retry-after"]) == (429, "4")
        error = (await reply.json())["error"]
    assert (error["predicted_ttft_s"], error["predicted_tbt_s"]) == (12.5, 0.25)
    assert error["type"] == "rate_limit_error"
    error = await refused(http, TEXT_PATH, 400, json=TEXT)
    assert error["message"] == "too long for any pool"


async def test_new_request_waits_for_the_successor_of_the_only_worker(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    workers = {"prefill-0", "prefill-1"}
    cluster.dead |= workers
    asked = asyncio.create_task(post(http, TEXT_PATH, TEXT))
    await cluster.until(lambda: len(cluster.places) >= 2)
    cluster.dead -= workers
    await asked


async def test_worker_failures_have_their_status(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    """A request fails after three losses, each at a different worker."""
    late, bug, bad = DeadlineExceeded("late"), MoonserveError("bug"), IntegrityError("bad block")
    await cluster.add("prefill-2", common_pb2.ROLE_PREFILL)
    for errors, status in (([late], 504), ([bug], 500), ([bad, bad, bad], 503)):
        cluster.scripts = list(map(failing, errors))
        body = await refused(http, TEXT_PATH, status, json=TEXT)
        assert "bug" not in body["message"]
    assert body["code"] == "worker_lost"
    excluded = [list(place.excluded_instances) for place in cluster.places[2:]]
    assert excluded == [[], ["prefill-0"], ["prefill-0", "prefill-1"]]


async def test_request_over_its_time_limit_gets_504(cluster: ScriptedCluster) -> None:
    cluster.scripts = [begins]
    async with clients_of(cluster, request_timeout_s=2.0) as http:
        error = await refused(http, TEXT_PATH, 504, json=TEXT)
    assert error["code"] == "deadline_exceeded"
    await cluster.until(lambda: len(cluster.cancels) == 2)


async def test_invalid_latency_headers_get_400_and_invalid_request_ids_are_replaced(
    http: aiohttp.ClientSession,
) -> None:
    for value in ("x", "-5", "0", "nan", "inf", "1e400", " "):
        error = await refused(http, TEXT_PATH, 400, json=TEXT, headers={"x-slo-ttft-ms": value})
        assert error["param"] == "x-slo-ttft-ms"
    for given in ("x" * 8_000, "a b", "<script>", "a\tb"):
        async with http.post(TEXT_PATH, json=TEXT, headers={"X-Request-Id": given}) as reply:
            assert reply.status == 200
            assert reply.headers["x-request-id"].startswith("req-")
