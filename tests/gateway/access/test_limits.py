"""Limits of API keys over real sockets: which requests are refused, how, and what is settled at the end."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from moonserve.gateway.access.api_key import ApiKey, KeyLimits, digest_of
from moonserve.gateway.access.key_file import KeyFile
from moonserve.gateway.access.redis_stores import RedisRateLimits
from moonserve.protocol.errors import ConfigError
from tests.gateway.conftest import clients_of, get, running_gateway
from tests.gateway.scripted_cluster import ScriptedCluster, begins
from tests.patience import PATIENCE_S, answered
from tests.redis_server import RedisServer

PATH = "/v1/completions"
BODY = {"prompt": [5] * 10, "max_tokens": 6, "ignore_eos": True}


@contextlib.asynccontextmanager
async def gateway(
    cluster: ScriptedCluster, folder: Path, **keys: ApiKey
) -> AsyncIterator[tuple[aiohttp.ClientSession, KeyFile]]:
    """Yields a client of a gateway with a key file. `keys`: records by the key itself."""
    file = KeyFile(folder / "keys.json")
    for key in keys.values():
        await file.add(key)
    async with clients_of(cluster, api_key_file=str(folder / "keys.json")) as http:
        yield http, file


def key(name: str, **limits: int) -> ApiKey:
    return ApiKey(digest=digest_of(name.encode()), tenant=name, limits=KeyLimits(**limits))


async def ask(http: aiohttp.ClientSession, name: str, body: dict = BODY) -> aiohttp.ClientResponse:
    async with http.post(PATH, json=body, headers={"authorization": f"Bearer {name}"}) as reply:
        await reply.read()
        return reply


async def test_requests_per_minute_are_exact_and_counted_per_key(cluster: ScriptedCluster, tmp_path: Path) -> None:
    keys = {name: key(name, requests_per_minute=3) for name in ("alice", "bob", "crowd")}
    async with gateway(cluster, tmp_path, **keys) as (http, _):
        replies = await asyncio.gather(*(ask(http, "crowd") for _ in range(50)))
        assert sorted(reply.status for reply in replies) == [200] * 3 + [429] * 47
        for name in ("alice", "bob"):
            replies = [await ask(http, name) for _ in range(3)]
            assert [reply.status for reply in replies] == [200] * 3
            left = [int(reply.headers["x-ratelimit-remaining-requests"]) for reply in replies]
            assert left == [2, 1, 0]
            refused = await ask(http, name)
            assert refused.status == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 20
            assert refused.headers["x-ratelimit-limit-requests"] == "3"
            assert refused.headers["x-request-id"]
            error = (await refused.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert len(cluster.places) == 9


async def test_expected_tokens_are_charged_and_settled_at_the_end(cluster: ScriptedCluster, tmp_path: Path) -> None:
    """10 tokens for the prompt and 400 for the answer are charged in advance; only the 6 that come are kept charged."""
    cluster.tokens[5], stop = 77, {"max_tokens": 400, "stop_token_ids": [77]}
    async with gateway(cluster, tmp_path, k=key("k", tokens_per_minute=1_000)) as (http, _):
        first, second = [await ask(http, "k", {**BODY, **stop}) for _ in range(2)]
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        # 16 tokens are refilled per second, so that 400 would take half a minute.
        assert 590 <= int(first.headers["x-ratelimit-remaining-tokens"]) < 700
        assert 574 <= int(second.headers["x-ratelimit-remaining-tokens"]) < 700
        placed = len(cluster.places)
        longer = await ask(http, "k", {**BODY, "prompt": [5] * 1_001})  # more than the limit per minute
        assert longer.status == 400
        assert "retry-after" not in longer.headers
        assert len(cluster.places) == placed


async def test_place_is_free_after_its_client_has_left(cluster: ScriptedCluster, tmp_path: Path) -> None:
    hanging = {**BODY, "max_tokens": 400, "stream": True}
    async with gateway(cluster, tmp_path, k=key("k", streams=1)) as (http, _):
        cluster.scripts.append(begins)
        headers = {"authorization": "Bearer k"}
        async with http.post(PATH, json=hanging, headers=headers) as stream:
            assert await stream.content.readline()
            refused = await ask(http, "k")
            assert refused.status == 429
            assert refused.headers["retry-after"] == "1"
        await answered(lambda: ask(http, "k"), lambda reply: reply.status == 200)


async def test_gateway_follows_a_key_file_and_ignores_a_broken_one(cluster: ScriptedCluster, tmp_path: Path) -> None:
    async with gateway(cluster, tmp_path, alice=key("alice")) as (http, file):

        async def knows_bob() -> bool:
            return (await ask(http, "bob")).status == 200

        assert not await knows_bob()
        await file.add(key("bob"))
        await answered(knows_bob)
        (tmp_path / "keys.json").write_text('{"keys": [')
        no_failure = "moonserve_api_keys_reload_failures_total 0.0"
        await answered(lambda: get(http, "/metrics"), lambda text: no_failure not in text)
        assert await knows_bob()
        (tmp_path / "keys.json").write_text(json.dumps({"keys": [key("bob").to_json()]}))
        await answered(lambda: ask(http, "alice"), lambda reply: reply.status == 401)
        assert await knows_bob()


async def test_priority_of_a_key_bounds_its_requests(cluster: ScriptedCluster, tmp_path: Path) -> None:
    record = ApiKey(digest=digest_of(b"k"), priority=5)
    async with gateway(cluster, tmp_path, k=record) as (http, _):
        for asked, placed in ((None, 5), (-3, 5), (9, 9)):
            body = BODY if asked is None else {**BODY, "priority": asked}
            assert (await ask(http, "k", body)).status == 200
            assert cluster.places[-1].priority == placed


async def test_without_keys_all_clients_share_the_limits(cluster: ScriptedCluster) -> None:
    async with clients_of(cluster, requests_per_minute=2) as http:
        assert [(await ask(http, name)).status for name in "abc"] == [200, 200, 429]
        await get(http, "/health")


async def test_gateways_of_a_registry_share_limits(cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RedisRateLimits.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)
    with RedisServer() as redis:
        limit = {"registry": redis.url, "requests_per_minute": 1}
        async with clients_of(cluster, **limit) as one, clients_of(cluster, **limit) as other:
            assert [(await ask(http, "")).status for http in (one, other)] == [200, 429]


@pytest.mark.parametrize("text", ["", "[]", '{"keys": {}}', '{"keys": [{"digest": "secret"}]}'])
async def test_gateway_does_not_start_with_an_unreadable_key_file(
    cluster: ScriptedCluster, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json") as caught:
        async with running_gateway(cluster, api_key_file=str(path)):
            pass
    assert "secret" not in str(caught.value)
