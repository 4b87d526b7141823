"""The exact form of streamed replies."""

from __future__ import annotations

import json

import aiohttp

from tests.gateway.scripted_cluster import ScriptedCluster
from gateway.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


async def events_of(http: aiohttp.ClientSession, path: str, body: dict) -> list[str]:
    async with http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        text = (await reply.read()).decode()
    assert text.endswith("\n\n")
    parts = text[:-2].split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


async def test_a_chat_stream_has_a_role_then_text_then_a_reason_then_done(http, cluster) -> None:
    """CONVENTIONS: first delta names the role, finish_reason in the last content chunk, [DONE] last."""
    *chunks, done = await events_of(http, "/v1/chat/completions", CHAT | {"max_tokens": 6})
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in parsed)
    assert " to be or not to be".startswith(text)
    assert len({(chunk["id"], chunk["created"]) for chunk in parsed}) == 1
