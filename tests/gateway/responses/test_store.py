"""Remembered responses: each tenant's own, and never more than the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.responses.handlers import ResponseStore, StoredResponse


def stored(size: int, name: str = "") -> StoredResponse:
    return StoredResponse(response={"id": name}, messages=[{"content": "x" * size}])


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


_steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "remove"]), st.sampled_from("xy"), st.sampled_from("abcde"), st.integers(0, 900)
    ),
    max_size=60,
)


@given(_steps, st.sampled_from([0, 2_000]))
def test_the_bound_and_the_books_hold_after_every_step(steps: list, max_bytes: int) -> None:
    store = ResponseStore(max_bytes)
    for kind, tenant, name, size in steps:
        if kind == "put":
            store.put(tenant, name, stored(size))
            assert store.get(tenant, name) is not None or size > 0 or not max_bytes
        elif kind == "get":
            store.get(tenant, name)
        else:
            store.remove(tenant, name)
            assert store.get(tenant, name) is None
        store.validate()
    assert max_bytes or not len(store)
