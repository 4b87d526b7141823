"""Misbehaving clients on real sockets: endless heads, silence, slow senders, and clients that do not read."""

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aiohttp
import pytest
import uvloop

from moonserve.gateway.http.connection import MAX_REFUSED, drop
from moonserve.gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import address_of, running_gateway
from tests.gateway.scripted_cluster import Run, ScriptedCluster
from tests.patience import NEVER_S, PATIENCE_S, came_true

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BODY = json.dumps({"prompt": [5] * 10, "max_tokens": 6, "ignore_eos": True}).encode()
SOON = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "slow_client_s": NEVER_S}
NEVER = {"header_timeout_s": NEVER_S, "body_timeout_s": NEVER_S, "slow_client_s": NEVER_S}


@contextlib.asynccontextmanager
async def connected(cluster: ScriptedCluster, **options: Any) -> AsyncIterator[Streams]:
    """Yields a connection to a gateway, which must still serve others afterwards."""
    async with running_gateway(cluster, **options) as url:
        reader, writer = await asyncio.open_connection(*address_of(url))
        try:
            yield reader, writer
            async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", data=BODY) as reply:
                assert reply.status == 200
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def head(*lines: str, length: int = len(BODY)) -> bytes:
    every = ("POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {length}", *lines)
    return "\r\n".join(every).encode() + b"\r\n\r\n"


async def answer_of(reader: asyncio.StreamReader) -> str:
    """Returns status and code of the last reply on the connection, or "" if it ends without a reply."""
    async with asyncio.timeout(PATIENCE_S):
        raw = await reader.read()
    if not raw:
        return ""
    first, _, body = raw.partition(b"\r\n\r\n")
    return f"{int(first.split()[1])} {json.loads(body)['error']['code']}"


ENDLESS = {
    "a header": (b"GET /health HTTP/1.1\r\nX: ", b"x" * 1_000),
    "headers": (b"GET /health HTTP/1.1\r\n", b"X-A: b\r\n" * 100),
    "a path": (b"GET /", b"x" * 1_000),
    "a name of a header": (b"GET /health HTTP/1.1\r\n", b"x" * 1_000),
    "trailers": (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X-A: b\r\n" * 100),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_endless_head_is_refused_at_the_limit(cluster: ScriptedCluster, name: str) -> None:
    begin, more = ENDLESS[name]
    async with connected(cluster, max_header_bytes=4_096, **NEVER) as (reader, writer):
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(50):  # with pauses, so that it arrives in pieces
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0)
        if name == "trailers":  # the request was being answered: no other reply may follow
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)
            return
        with contextlib.suppress(ConnectionResetError):
            assert await answer_of(reader) == "431 headers_too_large"


LONG_BODY = json.dumps({"prompt": [5] * 4_000, "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: "
RUBBISH = (
    b"\x16\x03\x01\x02\x00\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    POST + b"-5\r\n\r\n",
    POST + b"5\r\nContent-Length: 6\r\n\r\nhello!",
    b"BREW /v1/completions HTTP/1.1\r\n\r\n",
    random.Random(0).randbytes(10_000),
)
# Options, bytes sent, and the expected reply.
PIECES: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "a head in one piece with its body is measured without it": (
        {"max_header_bytes": 4_096, **NEVER},
        head("Connection: close", length=len(LONG_BODY)) + LONG_BODY,
        "400 context_length_exceeded",
    ),
    "and is too long by itself": (
        {"max_header_bytes": 4_096, **NEVER},
        head("X: " + "x" * 5_000) + BODY,
        "431 headers_too_large",
    ),
    "a head that does not come whole": (SOON, b"POST /v1/completions HTTP/1.1\r\nHo", "408 request_timeout"),
    "nothing": (SOON, b"", ""),
    "a body that does not come whole": (SOON, head(length=1_000) + b"{", "408 request_timeout"),
    **{f"no HTTP, {i}": (NEVER, raw, "400 invalid_http") for i, raw in enumerate(RUBBISH)},
}


@pytest.mark.parametrize("name", PIECES)
async def test_incomplete_or_invalid_request_ends_the_connection(cluster: ScriptedCluster, name: str) -> None:
    options, sent, expected = PIECES[name]
    async with connected(cluster, **options) as (reader, writer):
        writer.write(sent)
        assert await answer_of(reader) == expected


async def test_body_that_continues_after_its_refusal_ends_the_connection(cluster: ScriptedCluster) -> None:
    async with connected(cluster, api_key=(), **SOON, max_body_bytes=100) as (reader, writer):
        writer.write(head(length=10**6) + b"{")
        async with asyncio.timeout(PATIENCE_S):
            assert b" 413 " in await reader.readline()
            with contextlib.suppress(ConnectionError):
                while await reader.read(1_000):
                    writer.write(b"x")


async def test_slow_next_head_does_not_end_the_reply_in_flight(cluster: ScriptedCluster) -> None:
    """A slow next head does not end the first request's stream, although the head's timeout passes meanwhile."""
    go_on = asyncio.Event()

    async def slowly(run: Run) -> None:
        run.prefill_done()
        await go_on.wait()
        run.play()

    cluster.scripts.append(slowly)
    async with connected(cluster, **SOON) as (reader, writer):
        writer.write(head() + BODY + b"POST /v1/comp")
        await asyncio.sleep(0.6)  # longer than the timeout of a head
        go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            assert b" 200 " in await reader.readline()


async def test_client_that_does_not_read_a_large_reply_is_dropped(cluster: ScriptedCluster) -> None:
    """Replies without a worker count too. Here pipelined replies together exceed the size of all buffers."""
    async with connected(cluster, **{**NEVER, "slow_client_s": 0.3}) as (_, writer):
        writer.transport.pause_reading()
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        info = (socket.IPPROTO_TCP, socket.TCP_INFO, 1)  # its first byte is 1 until the peer resets the connection
        tcp = writer.get_extra_info("socket")
        await came_true(lambda: writer.transport.is_closing() or tcp.getsockopt(*info) != b"\1")


async def test_connections_above_the_limit_get_503(cluster: ScriptedCluster) -> None:
    async with running_gateway(cluster, max_connections=2, **NEVER) as url, asyncio.timeout(PATIENCE_S):

        async def asked() -> int:
            reader, writer = await asyncio.open_connection(*address_of(url))
            writer.write(head("Connection: close") + BODY)
            try:
                first = await reader.readline()
                text = await reader.read()
            except ConnectionResetError:
                first = text = b""
            writer.close()
            if not first:
                return 0  # closed at once
            status = int(first.split()[1])
            assert (status == 503) == (b"too_many_connections" in text) == (b"retry-after" in text)
            return status

        idle = [await asyncio.open_connection(*address_of(url)) for _ in range(2)]
        for _, writer in idle:
            writer.write(b"GET")  # so that the gateway has seen the connection
        while await asked() != 503:
            pass
        crowd = [await asyncio.open_connection(*address_of(url)) for _ in range(MAX_REFUSED + 5)]
        closed = 0
        while closed < 5:  # those beyond MAX_REFUSED are closed without a reply
            closed = sum(reader.at_eof() for reader, _ in crowd)
            await asyncio.sleep(0.01)
        for _, writer in (*idle, *crowd):
            writer.close()
        while await asked() != 200:
            pass


def test_stopping_gateway_answers_requests_on_their_way(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on uvloop, as the process does: asyncio's loop forgets accepted connections when its server closes."""
    monkeypatch.setattr("moonserve.gateway.http.connection.LINGER_S", NEVER_S)
    uvloop.run(_stopped_with_requests_on_their_way(tokenizer))


async def _stopped_with_requests_on_their_way(tokenizer: Tokenizer) -> None:
    """Requests are answered on kept connections, on silent ones, and on those in the kernel's accept queue."""
    cluster = ScriptedCluster(tokens=tokenizer.encode(" to be", add_special_tokens=False))
    await cluster.start()
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        stack.push_async_callback(cluster.stop)
        shared = running_gateway(cluster, reuse_port=True, drain_s=NEVER_S)
        at = address_of(await stack.enter_async_context(shared))
        silent, kept, left = [await asyncio.open_connection(*at) for _ in range(3)]
        kept[1].write(request)
        assert b" 200 " in await kept[0].readline()
        while (await kept[0].readline()).strip():
            pass
        waiting = [socket.create_connection(at) for _ in range(4)]
        stopping = asyncio.create_task(stack.pop_all().aclose())
        with contextlib.suppress(ConnectionRefusedError):  # once no socket listens
            while True:
                waiting.append(socket.create_connection(at))
                await asyncio.sleep(0)
        streams = [silent, kept, *[await asyncio.open_connection(sock=each) for each in waiting]]
        for reader, writer in streams:
            writer.write(request)
            reply = await reader.read()  # to its end
            assert b" 200 " in reply
            assert b"connection: close" in reply
        left[1].close()
        await stopping
        for _, writer in (*streams, left):
            writer.close()


async def test_stopping_gateway_does_not_wait_for_silent_connections(cluster: ScriptedCluster) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with running_gateway(cluster, reuse_port=True, drain_s=NEVER_S) as url:
            reader, writer = await asyncio.open_connection(*address_of(url))
        assert await reader.read() == b""
        writer.close()


async def _dropped_after(by_whom: str) -> None:
    """Drops a server's end of a real connection after it has already ended, by either side."""
    accepted: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
    lost = asyncio.Event()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.put_nowait(cast(asyncio.Transport, transport))  # uvloop's transport has the same methods

        def connection_lost(self, error: Exception | None) -> None:
            lost.set()

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    transport = await accepted.get()
    if by_whom == "client":
        writer.transport.abort()
    else:
        drop(transport)
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
    await asyncio.sleep(0)  # the socket is closed after the callback
    drop(transport)
    writer.close()
    server.close()


@pytest.mark.parametrize("by_whom", ["client", "server"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_drop_accepts_a_connection_that_has_ended(run: Callable[..., Any], by_whom: str) -> None:
    run(_dropped_after(by_whom))
