"""Remembered responses: each tenant's own, and never more than the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.responses.store import ResponseStore, StoredResponse


def stored(size: int, name: str = "") -> StoredResponse:
    return StoredResponse(response={"id": name}, messages=[{"content": "x" * size}])


def test_what_was_put_is_found_by_its_tenant_only() -> None:
    store = ResponseStore(10_000)
    store.put("alice", "resp_1", stored(10, "resp_1"))
    found = store.get("alice", "resp_1")
    assert found is not None
    assert found.response == {"id": "resp_1"}
    assert store.get("bob", "resp_1") is None
    assert not store.remove("bob", "resp_1")
    assert store.remove("alice", "resp_1")
    assert store.get("alice", "resp_1") is None


def test_a_flood_of_one_tenant_costs_the_other_nothing() -> None:
    store = ResponseStore(5_000)
    store.put("quiet", "mine", stored(500))
    for number in range(100):
        store.put("flood", f"resp_{number}", stored(500))
    assert store.get("quiet", "mine") is not None
    assert store.get("flood", "resp_99") is not None
    assert store.get("flood", "resp_0") is None


def test_what_was_used_last_stays_longest() -> None:
    store = ResponseStore(1_500)
    for name in "abc":
        store.put("t", name, stored(400))
        store.get("t", "a")
    store.put("t", "d", stored(400))
    assert store.get("t", "a") is not None
    assert store.get("t", "b") is None


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(0)
    store.put("t", "a", stored(0))
    assert len(store) == 0


_steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "remove"]),
        st.sampled_from("xy"),
        st.sampled_from("abcde"),
        st.integers(0, 900),
    ),
    max_size=60,
)


@given(_steps)
def test_the_bound_and_the_books_hold_after_every_step(steps: list) -> None:
    store = ResponseStore(2_000)
    for kind, tenant, name, size in steps:
        if kind == "put":
            store.put(tenant, name, stored(size))
            assert store.get(tenant, name) is not None or size > 0
        elif kind == "get":
            store.get(tenant, name)
        else:
            store.remove(tenant, name)
            assert store.get(tenant, name) is None
        store.validate()
