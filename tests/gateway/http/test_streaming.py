"""Format of streamed replies, clients that leave or do not read, and the queue of pieces for a reply's writer."""

import asyncio
import json
import re
import socket
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.generation.events import Piece
from moonserve.gateway.generation.output_queue import OutputQueue
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import FinishReason, RequestId, Token
from tests.gateway.conftest import (
    CHAT,
    CHAT_PATH,
    TEXT_PATH,
    address_of,
    content_by_choice,
    events,
    get,
    post,
    raw_events,
    running_gateway,
)
from tests.gateway.conftest import TEXT as WHOLE
from tests.gateway.http.test_connection import head
from tests.gateway.scripted_cluster import Run, ScriptedCluster, begins, failing
from tests.patience import PATIENCE_S, answered

TEXT = WHOLE | {"stream": True}


def request_of(fields: dict[str, Any]) -> bytes:
    """Returns the request as raw HTTP bytes."""
    body = json.dumps(fields).encode()
    return head(length=len(body)) + body


async def test_chat_stream_has_role_finish_reason_and_done(http: aiohttp.ClientSession) -> None:
    first, *chunks = await events(http, CHAT_PATH, CHAT)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_a_last_chunk_and_is_null_before(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    cluster.cached_tokens = 5
    body = CHAT | {"stream_options": {"include_usage": True}}
    *chunks, last = await events(http, CHAT_PATH, body)
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
        (CHAT_PATH, CHAT),
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        (TEXT_PATH, TEXT),
        (TEXT_PATH, TEXT | {"prompt": ["hello", "you"], "n": 2, "echo": True, "logprobs": 1}),
        (TEXT_PATH, TEXT | {"stop": "or no", "logprobs": 2, "echo": True}),
    ],
)
async def test_stream_and_whole_reply_have_the_same_content(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, path: str, body: dict[str, Any]
) -> None:
    """A stream adds up to the whole reply, with and without token ids; the ids are the cluster's tokens."""
    for with_ids in (False, True):
        request = body | {"return_token_ids": with_ids}
        chunks = await events(http, path, request)
        whole = await post(http, path, request | {"stream": False})
        contents = content_by_choice(chunks)
        assert contents == content_by_choice([whole])
        assert {chunk["object"].removesuffix(".chunk") for chunk in chunks} == {whole["object"]}
        if with_ids:
            every = [one.token_ids for one in contents.values()]
            assert all(ids == tuple(cluster.tokens[: len(ids)]) for ids in every)
            first = chunks[0].get("prompt_token_ids") or list(contents[0].prompt_token_ids)
            assert first == (whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"])


async def test_chunks_are_ascii_and_hold_whole_characters(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    cluster.tokens = tokenizer.encode("日本🎉", add_special_tokens=False)
    body = CHAT | {"max_tokens": len(cluster.tokens)}
    raw = await raw_events(http, CHAT_PATH, body)
    assert all(chunk.isascii() for chunk in raw)
    chunks = [json.loads(chunk) for chunk in raw[1:-1]]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "日本🎉"
    assert all("\\ufffd" not in chunk for chunk in raw)


async def test_choices_sample_with_consecutive_seeds(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    await events(http, TEXT_PATH, TEXT | {"n": 3, "seed": 2**64 - 1})
    seeds = sorted(message.sampling.seed for message in cluster.submissions)
    assert seeds == [0, 1, 2**64 - 1]
    await events(http, TEXT_PATH, TEXT)
    assert cluster.submissions[-1].sampling.seed < 2**63


async def test_failure_after_the_first_byte_ends_stream_and_connection_without_done(
    cluster: ScriptedCluster, url: str
) -> None:
    async def dies(run: Run) -> None:
        run.prefill_done()
        await cluster.until(lambda: len(cluster.reports) == 1)
        run.fail(MoonserveError("cannot go on"), by=run.decode)

    cluster.scripts = [dies]
    reader, writer = await asyncio.open_connection(*address_of(url))
    writer.write(request_of(TEXT))
    async with asyncio.timeout(PATIENCE_S):
        text = await reader.read()  # until the server closes
    error = json.loads(re.search(rb'data: ({"error".*})', text)[1])["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["code"] == "internal_error"
    assert b"[DONE]" not in text
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("how", ["dies", "replaced", "silent"])
async def test_stream_survives_the_loss_of_its_decode_worker(
    http: aiohttp.ClientSession,
    cluster: ScriptedCluster,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """A stream continues after its decode worker is killed, is replaced by a newer epoch (which is not excluded), or
    falls silent without closing. Tokens that the silent worker sends later are ignored."""
    old = cluster.workers["decode-0"]
    if how == "silent":
        monkeypatch.setattr("moonserve.gateway.cluster.failure_detection.SUSPECT_AFTER_S", 0.01)

    async def breaks(run: Run) -> None:
        run.prefill_done()
        run.decoded(run.token(1), run.token(2))
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
    cluster.cached_tokens = 3
    body = TEXT | {"return_token_ids": True, "stream_options": {"include_usage": True}}
    *chunks, usage = await events(http, TEXT_PATH, body)
    content = content_by_choice(chunks)[0]
    assert list(content.token_ids) == cluster.tokens[:6]
    assert content.text == tokenizer.decode(cluster.tokens[:6])
    excluded = [] if how == "replaced" else ["decode-0"]
    assert list(cluster.places[1].excluded_instances) == excluded
    assert cluster.submissions[1].request_id == cluster.submissions[0].request_id + "~2"
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    await old.server.stop(0)


async def test_retryable_failure_before_the_first_byte_moves_the_request(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    cluster.scripts = [failing(PeerLost("decode is gone"))]
    async with http.post(TEXT_PATH, json=TEXT) as reply:
        assert reply.status == 200
        assert reply.headers["x-prefill-instance-id"] == "prefill-0"
        assert reply.headers["x-decode-instance-id"] == "decode-1"
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")


async def test_first_token_is_reported_to_the_conductor_before_the_end(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    """The first token is reported before the end even if the answer ends first; otherwise its TTFT would be lost."""
    cluster.first_token_gate = asyncio.Event()
    await events(http, TEXT_PATH, TEXT)
    await asyncio.sleep(0.05)  # an end that does not wait would arrive meanwhile
    cluster.first_token_gate.set()
    await cluster.until(lambda: len(cluster.reports) == 2)
    phases = conductor_pb2.ReportRequest
    assert [report.phase for report in cluster.reports] == [phases.PHASE_FIRST_TOKEN, phases.PHASE_FINISHED]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_disconnect_cancels_at_both_workers(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, stream: bool
) -> None:
    cluster.scripts = [begins]
    asking = asyncio.ensure_future(http.post(TEXT_PATH, json=WHOLE | {"stream": stream}))
    await cluster.until(lambda: len(cluster.reports) == 1)
    if stream:
        (await asking).close()
    else:
        asking.cancel()
        await asyncio.wait({asking})
    await cluster.until(lambda: len(cluster.cancels) == 2 and len(cluster.reports) == 2)
    assert {instance for instance, _ in cluster.cancels} == {"prefill-0", "decode-0"}
    assert cluster.reports[1].phase == cluster.reports[1].PHASE_CANCELLED


async def test_client_disconnect_during_placement_releases_the_placement(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    cluster.place_gate = asyncio.Event()
    asking = asyncio.ensure_future(http.post(TEXT_PATH, json=WHOLE))
    await cluster.until(lambda: len(cluster.places) == 1)
    asking.cancel()
    await asyncio.wait({asking})
    await answered(lambda: get(http, "/v1/cluster"), lambda text: json.loads(text)["requests"] == 0)
    cluster.place_gate.set()
    await cluster.until(lambda: len(cluster.reports) == 1)
    assert cluster.submissions == []


async def test_slow_reader_is_dropped_without_delaying_others(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    """A slow reader's tokens do not pile up: the bounded queue overflows, which cancels the request at the workers."""

    async def floods(run: Run) -> None:
        run.prefill_done()
        for start in range(1, 20_001, 500):
            run.decoded(*(run.token(i, cluster.tokens[0]) for i in range(start, start + 500)))
            await asyncio.sleep(0)  # more than the kernel buffers for the client

    cluster.max_model_len = 10**6
    async with running_gateway(cluster, slow_client_s=0.3) as url:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(address_of(url))
        _, writer = await asyncio.open_connection(sock=narrow, limit=1)
        writer.transport.pause_reading()
        cluster.scripts = [floods]
        writer.write(request_of(TEXT | {"max_tokens": 500_000, "logprobs": 20}))
        await cluster.until(lambda: len(cluster.submissions) == 1)
        async with aiohttp.ClientSession(url) as http, http.post(TEXT_PATH, json=WHOLE) as reply:
            assert (await reply.json())["choices"][0]["finish_reason"] == "length"
        await cluster.until(lambda: len(cluster.cancels) == 2)
        writer.transport.abort()


ONE = (Token(request_id=RequestId("r"), index=0, token_id=1),)


def piece(text: str, *, is_last: bool = False) -> Piece:
    reason = FinishReason.LENGTH if is_last else None
    return Piece(index=0, text=text, tokens=ONE, finish_reason=reason)


async def read(queue: OutputQueue, accepts: list[bool], read_texts: list[str]) -> None:
    """Reads until the last piece. `accepts`: which of the pieces offered to the handler it handles at once."""

    def handle(each: Piece) -> bool:
        if accepts and not accepts.pop():
            return False
        read_texts.append(each.text)
        return True

    while True:
        for each in await queue.take(handle):
            read_texts.append(each.text)
            if each.finish_reason is not None:
                return


@given(accepts=st.lists(st.booleans()), pauses=st.lists(st.booleans(), min_size=1, max_size=20))
def test_queue_keeps_the_order_of_handled_and_queued_pieces(accepts: list[bool], pauses: list[bool]) -> None:
    async def run() -> None:
        queue, read_texts = OutputQueue(100), list[str]()
        reading = asyncio.create_task(read(queue, list(accepts), read_texts))
        for number, pause in enumerate(pauses):
            if pause:
                await asyncio.sleep(0)
            queue.put(piece(f"{number},"))
        queue.put(piece("end", is_last=True))
        await reading
        assert "".join(read_texts) == "".join(f"{number}," for number in range(len(pauses))) + "end"

    asyncio.run(run())


async def test_only_queued_pieces_count_as_unread() -> None:
    queue, read_texts = OutputQueue(2), list[str]()
    assert [queue.put(piece("x")) for _ in range(3)] == [True, True, False]
    queue = OutputQueue(2)
    reading = asyncio.create_task(read(queue, [], read_texts))
    await asyncio.sleep(0)
    assert all(queue.put(piece("x")) for _ in range(10))
    assert queue.put(piece("end", is_last=True))
    await reading
    assert read_texts == [*"xxxxxxxxxx", "end"]


async def test_error_replaces_unread_pieces() -> None:
    """A failed queue raises instead of yielding unread pieces. A cancelled reader receives nothing."""
    queue, read_texts = OutputQueue(100), list[str]()
    reading = asyncio.create_task(read(queue, [], read_texts))
    await asyncio.sleep(0)
    queue.put(piece("a"))
    queue.fail(ValueError("over"))
    queue.put(piece("b"))
    with pytest.raises(ValueError, match="over"):
        await reading
    queue = OutputQueue(100)
    reading = asyncio.create_task(read(queue, [], read_texts))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    queue.put(piece("c"))
    assert read_texts == ["a"]
