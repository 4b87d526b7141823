"""Stored form of an API key."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from moonserve.gateway.access.api_key import ApiKey, KeyLimits, check_strength, digest_of, from_json, new_key
from moonserve.gateway.access.key_table import KeyTable
from moonserve.protocol.errors import InvalidRequest

counts = st.none() | st.integers(1, 2**53)
texts = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=20)
records = st.builds(
    ApiKey,
    digest=st.binary(max_size=8).map(digest_of),
    tenant=texts,
    priority=st.none() | st.integers(-(2**31), 2**31 - 1),
    limits=st.builds(KeyLimits, requests_per_minute=counts, tokens_per_minute=counts, streams=counts),
    note=texts,
)


@given(records)
def test_record_round_trips_as_json(key: ApiKey) -> None:
    assert from_json(json.loads(json.dumps(key.to_json()))) == key


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda each: st.dictionaries(
            st.sampled_from(["digest", "tenant", "priority", "streams", "other"]) | st.text(), each
        ),
    )
)
def test_other_records_are_valid_or_refused(record: object) -> None:
    try:
        shown = str(isinstance(from_json(record), ApiKey))
    except InvalidRequest as error:
        shown = error.message
    assert shown != "False"
    assert len(shown) < 300


def test_invalid_fields_are_named_and_not_quoted() -> None:
    good = {"digest": digest_of(b"x")}
    for wrong, name in (
        ({}, "digest"),
        ({"digest": "secret"}, "digest"),
        ({**good, "tenant": "a\nb"}, "tenant"),
        ({**good, "priority": 2**31}, "priority"),
        ({**good, "streams": 0}, "streams"),
        ({**good, "streams": True}, "streams"),
        ({**good, "requests_per_minute": 1.5}, "requests_per_minute"),
        ({**good, "key": "secret"}, "key"),
    ):
        with pytest.raises(InvalidRequest, match=name) as caught:
            from_json(wrong)
        assert "secret" not in str(caught.value)


def test_presented_key_finds_only_its_own_record() -> None:
    keys = [new_key() for _ in range(20)]
    records = [ApiKey(digest=digest_of(k.encode()), tenant=str(i)) for i, k in enumerate(keys)]
    old = ApiKey(digest=records[0].digest, tenant="old")
    holder = KeyTable([old, *records], [], CollectorRegistry())
    for number, key in enumerate(keys):
        found = holder.find(key.encode())
        assert found.tenant == str(number), "the later record of a key counts"
        for near in (key[:-1], key + "x", key.lower(), digest_of(key.encode()), ""):
            assert holder.find(near.encode()) is None


def test_guessable_keys_are_refused() -> None:
    check_strength(new_key())
    for weak in ("", "password", "x" * 31, "x" * 40 + " ", "ü" * 40, "x" * 40 + "\n"):
        with pytest.raises(InvalidRequest):
            check_strength(weak)


def test_limits_of_a_key_override_those_for_all() -> None:
    own, all_ = KeyLimits(streams=2), KeyLimits(streams=9, tokens_per_minute=7)
    assert own.or_else(all_) == KeyLimits(streams=2, tokens_per_minute=7)
    assert KeyLimits().or_else(KeyLimits()).is_unlimited > own.is_unlimited
