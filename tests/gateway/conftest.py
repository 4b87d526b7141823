"""Fixtures and helpers: a gateway on loopback in front of a scripted cluster, and readers of its replies."""

import contextlib
import dataclasses
import io
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.server import serve
from moonserve.gateway.text.tokenizer import Tokenizer, load_tokenizer
from moonserve.protocol.grammar import GrammarCache
from tests.gateway.scripted_cluster import CLUSTER_TOKEN, ScriptedCluster
from tests.services import serving

MODEL = Path(__file__).parents[2] / "models" / "demo"
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
TEXT: dict[str, Any] = {"prompt": "hello", "max_tokens": 6}
GRAMMARS = GrammarCache(MODEL, vocab_size=4096, eos_token_ids=[1, 4])


def follows(grammar: str, text: str, tokenizer: Tokenizer) -> bool:
    """True if the text is an answer in the form that the grammar describes."""
    matcher = GRAMMARS.new_matcher(grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@contextlib.asynccontextmanager
async def running_gateway(cluster: ScriptedCluster, **options: object) -> AsyncIterator[str]:
    config = GatewayConfig(
        model=str(MODEL), port=0, conductor=cluster.address, cluster_token=CLUSTER_TOKEN, drain_s=0.2
    )
    async with serving(serve, dataclasses.replace(config, **options)) as facts:
        yield facts["http"]


def address_of(url: str) -> tuple[str, int]:
    """Returns host and port."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def clients_of(cluster: ScriptedCluster, **options: object) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a client session connected to a gateway with the given options."""
    async with running_gateway(cluster, **options) as url, aiohttp.ClientSession(url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Returns a reply that is not streamed. Fails on any status except 200."""
    async with http.post(path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def get(http: aiohttp.ClientSession, path: str, status: int = 200, **headers: str) -> str:
    """Returns the text of a reply. Fails on any other status."""
    async with http.get(path, headers=headers) as reply:
        text = await reply.text()
        assert reply.status == status, text
        return text


async def refused(http: aiohttp.ClientSession, path: str, status: int, **request: Any) -> dict[str, Any]:
    """Returns the error of a refused request, after checking the status and OpenAI's error form."""
    if "json" in request:  # aiohttp warns about large bodies that are not files
        request["data"] = io.BytesIO(json.dumps(request.pop("json")).encode())
    async with http.post(path, **request) as reply:
        text = await reply.text()
        assert reply.status == status, text
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"]
        error: dict[str, Any] = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def raw_events(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[str]:
    """Returns the data of every event of a stream."""
    async with http.post(path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = (await reply.read()).decode()
    assert text.endswith("\n\n")
    parts = text[:-2].split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


async def events(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a stream that ends with [DONE]."""
    *chunks, done = await raw_events(http, path, body)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in parsed}) == 1
    return parsed


@dataclasses.dataclass(slots=True)
class ReplyContent:
    """Content of one choice, joined from the chunks in which it arrived."""

    text: str = ""
    arguments: str = ""
    names: tuple[str, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    offsets: tuple[int, ...] = ()
    reason: str | None = None


def content_by_choice(replies: Iterable[dict[str, Any]]) -> dict[int, ReplyContent]:
    """Returns the content per choice, from the chunks of a stream or from one whole reply."""
    found: dict[int, ReplyContent] = {}
    for choice in (choice for reply in replies for choice in reply["choices"]):
        one = found.setdefault(choice["index"], ReplyContent())
        delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        one.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            one.names += (call["function"]["name"],) if "name" in call["function"] else ()
            assert ("name" in call["function"]) == call.get("id", "").startswith("call_")
            one.arguments += call["function"]["arguments"]
        one.prompt_token_ids += tuple(choice.get("prompt_token_ids", ()))
        one.token_ids += tuple(choice.get("token_ids", ()))
        logprobs = choice.get("logprobs") or {}
        columns = (logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "top_logprobs"))
        one.logprobs += (*logprobs.get("content", ()), *zip(*columns, strict=True))
        one.offsets += tuple(logprobs.get("text_offset", ()))
        one.reason = choice["finish_reason"] or one.reason
    return found


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@pytest.fixture
async def cluster(tokenizer: Tokenizer) -> AsyncIterator[ScriptedCluster]:
    made = ScriptedCluster(tokens=tokenizer.encode(" to be or not to be" * 200, add_special_tokens=False))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def url(cluster: ScriptedCluster) -> AsyncIterator[str]:
    async with running_gateway(cluster) as made:
        yield made


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as session:
        yield session


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as made:
        yield made
