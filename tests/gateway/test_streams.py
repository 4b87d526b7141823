"""The exact form of streamed replies."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

import gateway.cluster.silence
from gateway.text.tokenizer import Tokenizer
from protocol.errors import MoonserveError, PeerLost
from protocol.pb import conductor_pb2
from tests.gateway.conftest import events, post, raw_events, said
from tests.gateway.scripted_cluster import Run, ScriptedCluster
from tests.patience import PATIENCE_S

CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 6}
TEXT = {"prompt": "hello", "stream": True, "max_tokens": 6}


async def test_a_chat_stream_is_role_then_text_then_reason_then_done(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    first, *chunks = await events(http, "/v1/chat/completions", CHAT)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["delta"]["content"] for choice in choices)
    assert text == tokenizer.decode(cluster.tokens[:6])
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_one_more_chunk_and_is_null_before(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    cluster.cached_tokens = 5
    body = CHAT | {"stream_options": {"include_usage": True}}
    *chunks, last = await events(http, "/v1/chat/completions", body)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    prompt = len(cluster.submissions[0].token_ids) // 4
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 5},
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/completions", TEXT),
        ("/v1/completions", TEXT | {"prompt": ["hello", "you"], "n": 2, "echo": True, "logprobs": 1}),
        ("/v1/completions", TEXT | {"stop": "or no", "logprobs": 2, "echo": True}),
    ],
)
async def test_a_stream_says_the_same_as_a_whole_reply(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, path: str, body: dict[str, Any]
) -> None:
    """With token ids and without; also what the tokens were."""
    for with_ids in (False, True):
        wish = body | {"return_token_ids": with_ids}
        chunks = await events(http, path, wish)
        whole = await post(http, path, wish | {"stream": False})
        told = said(chunks)
        assert told == said([whole])
        assert {chunk["object"].removesuffix(".chunk") for chunk in chunks} == {whole["object"]}
        if with_ids:
            every = [one.token_ids for one in told.values()]
            assert all(ids == tuple(cluster.tokens[: len(ids)]) for ids in every)
            first = chunks[0].get("prompt_token_ids") or list(told[0].prompt_token_ids)
            assert first == (whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"])


async def test_characters_are_whole_in_chunks_of_plain_ascii(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    cluster.tokens = tokenizer.encode("日本🎉", add_special_tokens=False)
    body = CHAT | {"max_tokens": len(cluster.tokens)}
    raw = await raw_events(http, "/v1/chat/completions", body)
    assert all(chunk.isascii() for chunk in raw)
    chunks = [json.loads(chunk) for chunk in raw[1:-1]]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "日本🎉"
    assert all("\\ufffd" not in chunk for chunk in raw)


async def test_a_stop_string_across_tokens_is_cut_and_cancels_the_rest(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    body = TEXT | {"stop": ["or no", "unused"]}
    chunks = await events(http, "/v1/completions", body | {"max_tokens": 100})
    assert "".join(c["choices"][0]["text"] for c in chunks) == " to be "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    await cluster.until(lambda: len(cluster.cancels) == 2)
    assert {instance for instance, _ in cluster.cancels} == {"prefill-0", "decode-0"}


async def test_choices_sample_with_consecutive_seeds(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    await events(http, "/v1/completions", TEXT | {"n": 3, "seed": 2**64 - 1})
    seeds = sorted(message.sampling.seed for message in cluster.submissions)
    assert seeds == [0, 1, 2**64 - 1]
    await events(http, "/v1/completions", TEXT)
    assert cluster.submissions[-1].sampling.seed < 2**63


async def test_a_failure_after_the_first_byte_ends_the_stream_without_done_and_the_connection(
    cluster: ScriptedCluster, url: str
) -> None:
    async def dies(run: Run) -> None:
        run.prefill_done(cluster.tokens[0])
        await cluster.until(lambda: len(cluster.reports) == 1)
        run.fail(MoonserveError("cannot go on"), by=run.decode)

    cluster.scripts = [dies]
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(TEXT).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(PATIENCE_S):
        text = await reader.read()  # until the server closes
    error = json.loads(re.search(rb'data: ({"error".*})', text)[1])["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["code"] == "internal_error"
    assert b"[DONE]" not in text
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("how", ["dies", "replaced", "silent"])
async def test_a_stream_survives_its_decode_worker(
    http: aiohttp.ClientSession,
    cluster: ScriptedCluster,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Which is killed; or a newer epoch replaces it, which is welcome; or it falls silent and closes nothing. When it
    wakes up it goes on with what is not its any more, and nobody listens."""
    old = cluster.workers["decode-0"]
    if how == "silent":
        monkeypatch.setattr(gateway.cluster.silence, "SILENT_AFTER_S", 0.01)

    async def breaks(run: Run) -> None:
        run.prefill_done(cluster.tokens[0], cached_tokens=3)
        run.decoded(run.token(1, cluster.tokens[1]), run.token(2, cluster.tokens[2]))
        await cluster.until(lambda: len(cluster.reports) == 1)
        if how == "dies":
            await cluster.kill("decode-0")
        elif how == "replaced":
            await cluster.add("decode-0", old.role, epoch=2)
        else:
            cluster.last_heard_s["decode-0"] = 9.0
            await cluster.until(lambda: len(cluster.submissions) == 2)
            run.decoded(*(run.token(index, cluster.tokens[0]) for index in range(3, 6)))

    cluster.scripts = [breaks]
    body = TEXT | {"return_token_ids": True, "stream_options": {"include_usage": True}}
    *chunks, usage = await events(http, "/v1/completions", body)
    told = said(chunks)[0]
    assert list(told.token_ids) == cluster.tokens[:6]
    assert told.text == tokenizer.decode(cluster.tokens[:6])
    excluded = [] if how == "replaced" else ["decode-0"]
    assert list(cluster.places[1].excluded_instances) == excluded
    assert cluster.submissions[1].request_id == cluster.submissions[0].request_id + "~2"
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    await old.kill()


async def test_a_worker_that_gives_up_retryably_is_replaced_before_the_first_byte(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    async def gives_up(run: Run) -> None:
        run.fail(PeerLost("decode is gone"), by=run.prefill)

    cluster.scripts = [gives_up]
    async with http.post("/v1/completions", json=TEXT) as reply:
        assert reply.status == 200
        assert reply.headers["x-prefill-instance-id"] == "prefill-0"
        assert reply.headers["x-decode-instance-id"] == "decode-1"
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")


async def test_the_conductor_hears_of_the_first_token_before_the_end(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    """Of an answer that is over before the first report has arrived; otherwise its time to the first token is lost."""
    cluster.first_token_gate = asyncio.Event()
    await events(http, "/v1/completions", TEXT)
    await asyncio.sleep(0.05)  # an end that does not wait arrives meanwhile
    cluster.first_token_gate.set()
    await cluster.until(lambda: len(cluster.reports) == 2)
    phases = conductor_pb2.ReportRequest
    assert [report.phase for report in cluster.reports] == [phases.PHASE_FIRST_TOKEN, phases.PHASE_FINISHED]
