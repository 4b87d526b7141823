"""Chat templates that come with requests: only where the operator trusts clients, and in the sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gateway.text.tokenizer import Tokenizer
from protocol.keys import unpack_tokens
from tests.gateway.conftest import clients_of
from tests.gateway.scripted_cluster import ScriptedCluster

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TEMPLATE = (
    "{{ eos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ more }}"
)
PATH = "/v1/chat/completions"


@pytest.fixture
async def trusting(cluster: ScriptedCluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with clients_of(cluster, trust_request_chat_template=True) as session:
        yield session


async def test_it_is_refused_where_clients_are_not_trusted(http: aiohttp.ClientSession) -> None:
    for path in (PATH, "/tokenize"):
        async with http.post(path, json={**CHAT, "chat_template": TEMPLATE}) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in error["message"]


async def test_it_makes_the_prompt_with_the_models_special_tokens(
    trusting: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    body = {**CHAT, "chat_template": TEMPLATE, "chat_template_kwargs": {"more": "!"}}
    async with trusting.post(PATH, json=body) as reply:
        assert reply.status == 200, await reply.text()
    text = tokenizer.decode(unpack_tokens(cluster.submissions[0].token_ids))
    assert text.endswith("<user>hello!")
    async with trusting.post("/tokenize", json=body) as reply:
        assert (await reply.json())["tokens"] == unpack_tokens(cluster.submissions[0].token_ids)


@pytest.mark.parametrize(
    ("template", "param"),
    [
        *(("{% for", "chat_template"), ("{{ " + "(" * 20_000, "chat_template")),
        *(("", "chat_template"), ("{{ messages.__class__.__mro__ }}", "messages")),
    ],
)
async def test_what_is_no_template_is_refused(
    trusting: aiohttp.ClientSession, template: str, param: str
) -> None:
    async with trusting.post(PATH, json={**CHAT, "chat_template": template}) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, param), error
