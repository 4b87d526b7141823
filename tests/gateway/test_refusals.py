"""Every failure is an OpenAI error with the right status."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gateway.text.tokenizer import Tokenizer
from protocol.errors import DeadlineExceeded, IntegrityError, MoonserveError
from protocol.pb import common_pb2, conductor_pb2
from tests.gateway.conftest import running_gateway
from tests.gateway.scripted_cluster import MAX_MODEL_LEN, Run, ScriptedCluster

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
TEXT = {"prompt": "hello", "max_tokens": 6}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


async def refused(http: aiohttp.ClientSession, path: str, status: int, **request: Any) -> dict:
    async with http.post(path, **request) as reply:
        text = await reply.text()
        assert reply.status == status, text
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"]
        error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b"[" * 9999,
]


async def test_malformed_bodies_are_400(http: aiohttp.ClientSession) -> None:
    for raw in MALFORMED:
        error = await refused(http, TEXT_PATH, 400, data=raw)
        assert error["type"] == "invalid_request_error"


BAD_PARAMETERS = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ({"min_tokens": 7}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"seed": 2**65}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [4096]}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 1e4}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_bad_parameters_are_400_and_named(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, path: str
) -> None:
    body = CHAT if path == CHAT_PATH else TEXT
    for change, param in BAD_PARAMETERS:
        error = await refused(http, path, 400, json=body | change)
        assert error["param"].startswith(param), (change, error)
    assert cluster.places == []


async def test_numbers_that_are_none_are_400(http: aiohttp.ClientSession) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw = f'{{"prompt": "x", "temperature": {number}}}'
        await refused(http, TEXT_PATH, 400, data=raw)


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "martian", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    ({"functions": [{}]}, "functions"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (
        {"continue_final_message": True, "messages": [{"role": "user", "content": " "}]},
        "continue_final_message",
    ),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ messages[0].content }}"}, "chat_template"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
]


async def test_bad_chats_are_400_and_named(http: aiohttp.ClientSession) -> None:
    for change, param in BAD_CHATS:
        error = await refused(http, CHAT_PATH, 400, json=CHAT | change)
        assert error["param"] == param, (change, error)


BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [2**80]}, "prompt"),
    ({"prompt": ["x"] * 200}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 65, "prompt": ["x", "y"]}, "best_of"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 20, "prompt": [[5] * 300] * 128}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 20, "prompt": [5] * 300, "n": 128}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
]


async def test_bad_completions_are_400_and_named(http: aiohttp.ClientSession) -> None:
    for change, param in BAD_COMPLETIONS:
        error = await refused(http, TEXT_PATH, 400, json=TEXT | change)
        assert error["param"] == param, (change, error)


async def test_too_many_prompts_are_refused_before_any_is_read(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    for change in ({"prompt": ["x"] * 129}, {"prompt": ["x"] * 65, "n": 2}):
        error = await refused(http, TEXT_PATH, 400, json=TEXT | change)
        assert "more than 128 choices" in error["message"]


async def test_a_bug_is_an_openai_error_without_details_and_is_logged(
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(self: Tokenizer, *args: object, **options: object) -> list[int]:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(Tokenizer, "encode", broken)
    error = await refused(http, TEXT_PATH, 500, json=TEXT)
    assert (error["type"], error["message"]) == ("internal_error", "internal error")
    assert [r.exc_info for r in caplog.records if f"POST {TEXT_PATH} failed" in r.getMessage()]


async def test_a_missing_prompt_is_named(http: aiohttp.ClientSession) -> None:
    error = await refused(http, TEXT_PATH, 400, json={})
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


async def test_prompts_over_the_context_are_400(http: aiohttp.ClientSession) -> None:
    for prompt in ([5] * MAX_MODEL_LEN, "to be " * 100_000, "a b " * 500):
        error = await refused(http, TEXT_PATH, 400, json={"prompt": prompt})
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


async def test_an_unknown_model_is_404(http: aiohttp.ClientSession) -> None:
    error = await refused(http, TEXT_PATH, 404, json=TEXT | {"model": "gpt-4"})
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_unknown_parameters_are_ignored_with_one_warning(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gateway.wishes.schema"):
        for _ in range(3):
            async with http.post(TEXT_PATH, json=TEXT | {"frobnicate": 1}) as reply:
                assert reply.status == 200
    assert sum("frobnicate" in record.message for record in caplog.records) == 1


async def test_unknown_paths_are_404_and_wrong_methods_405(http: aiohttp.ClientSession) -> None:
    assert (await refused(http, "/v1/nothing", 404))["code"] == "not_found"
    async with http.get(TEXT_PATH) as reply:
        assert reply.status == 405
        assert reply.headers["allow"] == "POST"
        assert (await reply.json())["error"]["code"] == "method_not_allowed"


async def test_embeddings_are_400(http: aiohttp.ClientSession) -> None:
    await refused(http, "/v1/embeddings", 400, json={"input": "x"})


async def test_bodies_over_the_limit_are_413_however_they_are_sent(
    cluster: ScriptedCluster,
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 1000

    async with (
        running_gateway(cluster, max_body_bytes=5_000) as url,
        aiohttp.ClientSession(url) as http,
    ):
        for data in (b"x" * 20_000, pieces()):
            error = await refused(http, TEXT_PATH, 413, data=data)
            assert error["code"] == "request_too_large"


async def test_a_body_that_does_not_come_is_408(cluster: ScriptedCluster) -> None:
    never = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    async with (
        running_gateway(cluster, body_timeout_s=0.1) as url,
        aiohttp.ClientSession(url) as http,
    ):
        error = await refused(http, TEXT_PATH, 408, data=stalls())
        assert error["code"] == "request_timeout"


async def test_api_keys_guard_what_costs(cluster: ScriptedCluster) -> None:
    async with (
        running_gateway(cluster, api_key=("one", "two")) as url,
        aiohttp.ClientSession(url) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}):
            error = await refused(http, TEXT_PATH, 401, json=TEXT, headers=headers)
            assert error["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics", "/version", "/dashboard"):
            async with http.get(path) as reply:
                assert reply.status == 200
        headers = {"Authorization": "Bearer two"}
        async with http.post(TEXT_PATH, json=TEXT, headers=headers) as reply:
            assert reply.status == 200


async def test_overload_is_429_with_predictions(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    cluster.place_replies = [
        conductor_pb2.PlaceReply(
            overloaded=conductor_pb2.Overloaded(
                predicted_ttft_s=12.5, predicted_tbt_s=0.25, retry_after_s=3.2, reason="busy"
            )
        )
    ]
    async with http.post(TEXT_PATH, json=TEXT) as reply:
        assert reply.status == 429
        assert reply.headers["retry-after"] == "4"
        error = (await reply.json())["error"]
    assert (error["predicted_ttft_s"], error["predicted_tbt_s"]) == (12.5, 0.25)
    assert error["type"] == "rate_limit_error"


async def test_no_worker_is_503_with_retry_after(cluster: ScriptedCluster) -> None:
    cluster.dead |= {"prefill-0", "prefill-1"}
    async with (
        running_gateway(cluster, worker_patience_s=0.0) as url,
        aiohttp.ClientSession(url) as http,
        http.post(TEXT_PATH, json=TEXT) as reply,
    ):
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert (await reply.json())["error"]["code"] == "no_worker"


async def test_a_new_request_waits_for_the_successor_of_the_only_worker(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    workers = {"prefill-0", "prefill-1"}
    cluster.dead |= workers

    async def ask() -> int:
        async with http.post(TEXT_PATH, json=TEXT) as reply:
            return reply.status

    asked = asyncio.create_task(ask())
    await cluster.until(lambda: len(cluster.places) >= 2)
    cluster.dead -= workers
    assert await asked == 200


async def test_the_conductors_own_refusals_keep_their_status(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    cluster.place_replies = [
        conductor_pb2.PlaceReply(
            failure=common_pb2.Failure(code="invalid_request", message="too long for any pool")
        )
    ]
    error = await refused(http, TEXT_PATH, 400, json=TEXT)
    assert error["message"] == "too long for any pool"


@pytest.mark.parametrize(
    ("error", "status"), [(DeadlineExceeded("late"), 504), (MoonserveError("bug"), 500)]
)
async def test_failures_of_workers_have_their_status(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, error: MoonserveError, status: int
) -> None:
    async def fails(run: Run) -> None:
        run.fail(error, by=run.prefill)

    cluster.scripts = [fails]
    body = await refused(http, TEXT_PATH, status, json=TEXT)
    assert "bug" not in body["message"]


async def test_the_time_limit_of_a_request_is_504(cluster: ScriptedCluster) -> None:
    async def stalls(run: Run) -> None:
        await asyncio.Event().wait()

    cluster.scripts = [stalls]
    async with (
        running_gateway(cluster, request_timeout_s=2.0) as url,
        aiohttp.ClientSession(url) as http,
    ):
        error = await refused(http, TEXT_PATH, 504, json=TEXT)
    assert error["code"] == "deadline_exceeded"
    await cluster.until(lambda: len(cluster.cancels) == 2)


async def test_three_losses_are_503(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    async def dies(run: Run) -> None:
        run.fail(IntegrityError("bad block"), by=run.prefill)

    cluster.scripts = [dies, dies, dies]
    await cluster.add("prefill-2", common_pb2.ROLE_PREFILL)
    error = await refused(http, TEXT_PATH, 503, json=TEXT)
    assert error["code"] == "worker_lost"
    assert [list(place.excluded_instances) for place in cluster.places] == [
        [],
        ["prefill-0"],
        ["prefill-0", "prefill-1"],
    ]


async def test_bad_targets_in_headers_are_400(http: aiohttp.ClientSession) -> None:
    for value in ("x", "-5", "0", "nan", "inf"):
        error = await refused(http, TEXT_PATH, 400, json=TEXT, headers={"x-slo-ttft-ms": value})
        assert error["param"] == "x-slo-ttft-ms"


async def test_request_ids_that_are_not_printable_words_are_replaced(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post(TEXT_PATH, json=TEXT, headers={"X-Request-Id": "a b"}) as reply:
        assert reply.headers["x-request-id"].startswith("req-")
