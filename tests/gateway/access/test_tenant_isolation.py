"""Tenants: whose request it is (by API key, or by the body's user), and which requests may share blocks."""

import json

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.access.tenant_isolation import salt_of
from moonserve.gateway.config import parse_tenant_keys
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import block_keys, root_key
from tests.gateway.conftest import clients_of, get, post, refused
from tests.gateway.scripted_cluster import BLOCK_SIZE, ScriptedCluster

names = st.none() | st.text(max_size=8)


@given(st.lists(st.tuples(names, names), min_size=2, max_size=8, unique=True))
def test_different_tenants_and_salts_share_no_block_key(pairs: list[tuple[str | None, str | None]]) -> None:
    asked = {(tenant or "", salt or "") for tenant, salt in pairs}
    salts = {pair: salt_of(*pair) for pair in asked}
    assert len(set(salts.values())) == len(asked)
    chains = [block_keys(root_key("f", salt), [1, 2, 3, 4], 2) for salt in salts.values()]
    assert len({key for chain in chains for key in chain}) == 2 * len(asked)


@given(st.text(min_size=1, max_size=8), names)
def test_client_cannot_choose_a_tenants_salt(tenant: str, salt: str | None) -> None:
    """A client cannot reach a tenant's blocks even by giving the salt that the tenant's requests have."""
    implied = salt_of(tenant, salt)
    assert salt_of(None, implied) != implied
    assert salt_of("", implied) != implied
    assert salt_of("another", implied) != implied


def test_salts_are_stable_and_empty_without_tenant() -> None:
    """Salts are equal across starts and versions, because the keys of blocks on disk derive from them."""
    assert salt_of(None, None) == salt_of("", "") == ""
    assert salt_of("alice", None).startswith("15d7e48e627af014")


PATH, BODY = "/v1/completions", {"prompt": "hello", "max_tokens": 6}


async def ask(http: aiohttp.ClientSession, key: str = "", user: str = "bob") -> None:
    await post(http, PATH, {**BODY, "user": user}, **({"Authorization": f"Bearer {key}"} if key else {}))


async def test_tenant_comes_from_the_key_not_from_the_body(cluster: ScriptedCluster) -> None:
    """A tenant's key determines the tenant, whatever the body names. Other keys stand for the unnamed tenant."""
    async with clients_of(cluster, api_key=("three",), tenant_keys=("alice=one", "bob=t=wo==")) as http:
        wrong = ("one", "Basic one", "Bearer alice", "Bearer alice=one", "Bearer wo==")
        for headers in ({}, *({"Authorization": each} for each in wrong)):
            error = await refused(http, PATH, 401, json=BODY, headers=headers)
            assert error["code"] == "invalid_api_key"
        for path in ("/", "/health", "/ready", "/metrics", "/version", "/dashboard"):  # open to all
            await get(http, path)
        for key, tenant in (("one", "alice"), ("t=wo==", "bob"), ("three", "")):
            await ask(http, key)
            assert cluster.places[-1].tenant == tenant


async def test_tenant_sees_only_its_own_decisions_and_operator_sees_all(cluster: ScriptedCluster) -> None:
    keys = ("alice=one", "carol=two")
    async with clients_of(cluster, api_key=("three",), tenant_keys=keys) as http:
        await ask(http, "one")
        request_id, latest_by_key = cluster.places[-1].request_id, {}
        for key, status in (("one", 200), ("two", 404), ("three", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            await get(http, f"/v1/requests/{request_id}/explain", status, **headers)
            latest_by_key[key] = json.loads(await get(http, "/v1/figures", **headers)).get("latest")
    assert latest_by_key["one"] is latest_by_key["two"] is None
    [latest] = latest_by_key["three"]
    assert latest["request_id"] == request_id
    assert (latest["outcome"], latest["output_tokens"]) == ("length", BODY["max_tokens"])
    assert 0 < latest["ttft_s"] <= latest["e2e_s"]


async def test_only_an_operators_key_sees_the_text_of_prefixes(cluster: ScriptedCluster) -> None:
    """Without keys, everybody would read everybody's prompts."""
    cluster.cached_tokens = BLOCK_SIZE
    for key, tenants in (("", ()), ("three", ()), ("one", ("alice=one",))):
        async with clients_of(cluster, api_key=("three",) if key else (), tenant_keys=tenants) as http:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            await post(http, PATH, BODY | {"prompt": "to be or not to be " * 9}, **headers)
            figures = await get(http, "/v1/figures", **headers)
            assert ("to be or not" in figures) == (key == "three")
            assert ('"holders":["prefill-' in figures) == (key != "one")


async def test_without_tenant_keys_the_body_names_the_tenant(cluster: ScriptedCluster) -> None:
    """Long names are replaced by a digest, because the conductor keeps thousands and would run out of memory."""
    for options, key in (({}, ""), ({"api_key": ("three",)}, "three")):
        async with clients_of(cluster, **options) as http:
            await ask(http, key)
            assert cluster.places[-1].tenant == "bob"
            for name in ("ü" * 100_000, "ü" * 100_000, "ü" * 99_999):
                await ask(http, key, name)
    first, same, other = (place.tenant for place in cluster.places[-3:])
    assert first == same != other
    assert len(first) <= 256


def test_invalid_tenant_keys_are_refused_without_being_quoted() -> None:
    assert parse_tenant_keys(("alice=one", "bob=t=wo==")) == {"alice": "one", "bob": "t=wo=="}
    for wrong in (("alice",), ("=secret",), ("alice=",), ("a=secret", "a=other"), ("a=s", "b=s")):
        with pytest.raises(ConfigError, match="tenant-keys") as caught:
            parse_tenant_keys(wrong)
        assert "secret" not in str(caught.value)
