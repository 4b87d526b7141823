"""Clients' hints about the KV cache, in the forms of each API: what reaches the workers, and what is refused."""

from typing import Any

import aiohttp
import pytest

from moonserve.protocol.request import CacheHints
from moonserve.protocol.rpc.wire import request_from_wire
from tests.gateway.conftest import post, refused
from tests.gateway.scripted_cluster import ScriptedCluster

ASKED = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [ASKED], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [ASKED], "max_tokens": 2},
}
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def hints_of(cluster: ScriptedCluster) -> CacheHints:
    return request_from_wire(cluster.submissions[-1]).cache_hints


@pytest.mark.parametrize("path", BODIES)
async def test_hints_reach_the_prefill_worker(http: aiohttp.ClientSession, cluster: ScriptedCluster, path: str) -> None:
    given = {"store": False, "ttl_s": 60, "eviction_priority": "low"}
    await post(http, path, {**BODIES[path], "kv_cache": given})
    assert hints_of(cluster) == CacheHints(store=False, ttl_s=60.0, low_priority=True)
    await post(http, path, {**BODIES[path], "kv_cache": {"return_within_s": 30, "eviction_priority": "normal"}})
    assert hints_of(cluster) == CacheHints(return_within_s=30.0)
    assert cluster.places[-1].expected_return == "within 30.0 s, by the client's hint"
    await post(http, path, BODIES[path])
    assert hints_of(cluster) == CacheHints()
    assert not cluster.places[-1].expected_return


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("store", "no", "boolean"),
        ("return_within_s", 0, "greater than 0"),
        ("return_within_s", 3601, "less than or equal to 3600"),
        ("ttl_s", float(2**31), "less than or equal to 86400"),
        ("eviction_priority", "lowest", "'normal' or 'low'"),
        ("stor", True, "Extra inputs"),
    ],
)
async def test_a_wrong_hint_is_refused_with_what_is_allowed(
    http: aiohttp.ClientSession, path: str, field: str, value: object, allowed: str
) -> None:
    async with http.post(path, json={**BODIES[path], "kv_cache": {field: value}}) as reply:
        assert reply.status == 400
        message = (await reply.json())["error"]["message"]
    assert f"kv_cache.{field}" in message
    assert allowed in message


@pytest.mark.parametrize(("retention", "ttl_s"), [("in_memory", 3_600.0), ("in-memory", 3_600.0), ("24h", 86_400.0)])
async def test_openais_retention_is_a_ttl(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, retention: str, ttl_s: float
) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        await post(http, path, {**BODIES[path], "prompt_cache_retention": retention})
        assert hints_of(cluster).ttl_s == ttl_s
    error = await refused(http, "/v1/completions", 400, json={**BODIES[path], "prompt_cache_retention": "1w"})
    assert "'in_memory', 'in-memory' or '24h'" in error["message"]


async def test_the_longest_of_anthropics_cache_controls_counts(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    blocks = [{"type": "text", "text": "hi", "cache_control": SHORT}]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2}
    for more, ttl_s in (({}, 300.0), ({"system": [{**blocks[0], "cache_control": LONG}]}, 3_600.0)):
        await post(http, "/v1/messages", body | more)
        assert hints_of(cluster).ttl_s == ttl_s
    await post(http, "/v1/messages", {**body, "cache_control": LONG, "kv_cache": {"ttl_s": 7}})
    assert hints_of(cluster).ttl_s == 7.0
    for wrong in ({"type": "eternal"}, {"type": "ephemeral", "ttl": "2h"}, "ephemeral"):
        async with http.post("/v1/messages", json={**body, "cache_control": wrong}) as reply:
            assert reply.status == 400
            assert '"5m" or "1h"' in (await reply.json())["error"]["message"]


async def test_a_session_that_came_back_is_expected_again(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    body = {**BODIES["/v1/completions"], "prompt_cache_key": "friday"}
    for _ in range(4):
        await post(http, "/v1/completions", body)
    hints = hints_of(cluster)
    assert hints.return_within_s is not None
    assert hints.return_within_s > 0.0
    assert cluster.places[-1].expected_return.endswith("by the pauses of the session")
    await post(http, "/v1/completions", {**body, "kv_cache": {"eviction_priority": "low"}})
    assert hints_of(cluster) == CacheHints(low_priority=True)
