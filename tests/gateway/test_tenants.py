"""Who asks: the tenant whose key it is, or whom the body names."""

from __future__ import annotations

import aiohttp
import pytest

from gateway.config import parse_tenant_keys
from protocol.errors import ConfigError
from tests.gateway.conftest import clients_of
from tests.gateway.scripted_cluster import ScriptedCluster

PATH, BODY = "/v1/completions", {"prompt": "hello", "max_tokens": 6}


async def ask(http: aiohttp.ClientSession, key: str | None, user: str = "bob") -> int:
    """The status."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with http.post(PATH, json={**BODY, "user": user}, headers=headers) as reply:
        await reply.read()
        return reply.status


async def test_a_tenants_key_says_who_asks_whoever_the_body_names(cluster: ScriptedCluster) -> None:
    """A key of nobody in particular is the tenant without a name."""
    async with clients_of(cluster, api_key=("three",), tenant_keys=("alice=one", "bob=t=wo==")) as http:
        for wrong in (None, "alice", "alice=one", "wo=="):
            assert await ask(http, wrong) == 401
        for key, tenant in (("one", "alice"), ("t=wo==", "bob"), ("three", "")):
            assert await ask(http, key) == 200
            assert cluster.places[-1].tenant == tenant


async def test_the_latest_requests_are_for_those_who_may_see_all_tenants(cluster: ScriptedCluster) -> None:
    async with clients_of(cluster, api_key=("three",), tenant_keys=("alice=one",)) as http:
        assert await ask(http, "one") == 200
        told = {}
        for key in ("one", "three"):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.get("/v1/figures", headers=headers) as reply:
                told[key] = await reply.json()
    assert "latest" not in told["one"]
    [latest] = told["three"]["latest"]
    assert latest["request_id"] == cluster.places[-1].request_id
    assert (latest["outcome"], latest["output_tokens"]) == ("length", BODY["max_tokens"])
    assert 0 < latest["ttft_s"] <= latest["e2e_s"]


async def test_a_tenant_sees_its_own_decisions_and_an_operator_all(cluster: ScriptedCluster) -> None:
    keys = ("alice=one", "carol=two")
    async with clients_of(cluster, api_key=("three",), tenant_keys=keys) as http:
        assert await ask(http, "one") == 200
        path = f"/v1/requests/{cluster.places[-1].request_id}/explain"
        for key, status in (("one", 200), ("two", 404), ("three", 200)):
            async with http.get(path, headers={"Authorization": f"Bearer {key}"}) as reply:
                assert reply.status == status


async def test_without_tenants_keys_a_tenant_is_whom_the_body_names(cluster: ScriptedCluster) -> None:
    """By a digest where the name is very long: the conductor keeps thousands, which would be all of its memory."""
    for options, key in (({}, None), ({"api_key": ("three",)}, "three")):
        async with clients_of(cluster, **options) as http:
            assert await ask(http, key) == 200
            assert cluster.places[-1].tenant == "bob"
            for name in ("ü" * 100_000, "ü" * 100_000, "ü" * 99_999):
                assert await ask(http, key, name) == 200
    first, same, other = (place.tenant for place in cluster.places[-3:])
    assert first == same != other
    assert len(first) <= 256


def test_keys_that_cannot_be_are_refused_without_being_told() -> None:
    assert parse_tenant_keys(("alice=one", "bob=t=wo==")) == {"alice": "one", "bob": "t=wo=="}
    for wrong in (("alice",), ("=secret",), ("alice=",), ("a=secret", "a=other"), ("a=s", "b=s")):
        with pytest.raises(ConfigError, match="tenant-keys") as caught:
            parse_tenant_keys(wrong)
        assert "secret" not in str(caught.value)
