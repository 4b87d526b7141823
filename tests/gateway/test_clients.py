"""The official client works against the gateway, and clients that leave or do not read do no harm."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import openai
import pytest

from gateway.text.tokenizer import Tokenizer
from protocol.errors import Incompatible
from tests.gateway.conftest import running_gateway
from tests.gateway.scripted_cluster import Run, ScriptedCluster
from tests.patience import PATIENCE_S

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = {"prompt": "hello", "max_tokens": 6}


async def test_the_official_client_raises_what_ends_a_stream(url: str, cluster: ScriptedCluster) -> None:
    async def dies(run: Run) -> None:
        run.prefill_done(cluster.tokens[0])
        await cluster.until(lambda: len(cluster.reports) > 0)
        run.fail(Incompatible("cannot go on"), by=run.decode)

    cluster.scripts = [dies]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.completions.create(**TEXT, model="demo", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_at_both_workers(url: str, cluster: ScriptedCluster, stream: bool) -> None:
    async def stalls(run: Run) -> None:
        run.prefill_done(cluster.tokens[0])
        await asyncio.Event().wait()

    cluster.scripts = [stalls]
    async with aiohttp.ClientSession(url) as http:
        asking = asyncio.ensure_future(http.post("/v1/completions", json=TEXT | {"stream": stream}))
        await cluster.until(lambda: len(cluster.reports) == 1)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.wait({asking})
        await cluster.until(lambda: len(cluster.cancels) == 2 and len(cluster.reports) == 2)
    assert {instance for instance, _ in cluster.cancels} == {"prefill-0", "decode-0"}
    assert cluster.reports[1].phase == cluster.reports[1].PHASE_CANCELLED


async def test_a_client_that_leaves_before_placement_ends_gives_the_placement_back(
    url: str, cluster: ScriptedCluster
) -> None:
    cluster.place_gate = asyncio.Event()
    async with aiohttp.ClientSession(url) as http:
        asking = asyncio.ensure_future(http.post("/v1/completions", json=TEXT))
        await cluster.until(lambda: len(cluster.places) == 1)
        asking.cancel()
        await asyncio.wait({asking})
        await gone(url)
        cluster.place_gate.set()
        await cluster.until(lambda: len(cluster.reports) == 1)
    assert cluster.submissions == []


async def gone(url: str) -> None:
    """Until the gateway has nothing under way."""
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get("/v1/cluster") as reply:
                if (await reply.json())["requests"] == 0:
                    return


async def test_a_slow_reader_is_given_up_and_others_are_not_held_up(
    cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    """Its tokens do not pile up: the bounded queue ends the request at the workers."""

    async def floods(run: Run) -> None:
        run.prefill_done(cluster.tokens[0])
        for start in range(1, 20_001, 500):
            run.decoded(*(run.token(i, cluster.tokens[0]) for i in range(start, start + 500)))
            await asyncio.sleep(0)  # more than the kernel buffers for it

    cluster.max_model_len = 10**6
    async with running_gateway(cluster, slow_client_s=0.3) as url:
        host, port = url.removeprefix("http://").split(":")
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((host, int(port)))
        _, writer = await asyncio.open_connection(sock=narrow, limit=1)
        writer.transport.pause_reading()
        cluster.scripts = [floods]
        body = json.dumps(TEXT | {"stream": True, "max_tokens": 500_000, "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await cluster.until(lambda: len(cluster.submissions) == 1)
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=TEXT) as reply:
            assert (await reply.json())["choices"][0]["finish_reason"] == "length"
        await cluster.until(lambda: len(cluster.cancels) == 2)
        writer.transport.abort()
