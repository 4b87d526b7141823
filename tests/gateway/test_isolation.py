"""Which requests may share blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.access.isolation import salt_of
from protocol.keys import block_keys, root_key

names = st.none() | st.text(max_size=8)


@given(st.lists(st.tuples(names, names), min_size=2, max_size=8, unique=True))
def test_different_tenants_and_salts_share_no_key_whatever_they_are_called(
    pairs: list[tuple[str | None, str | None]],
) -> None:
    asked = {(tenant or "", salt or "") for tenant, salt in pairs}
    salts = {pair: salt_of(*pair) for pair in asked}
    assert len(set(salts.values())) == len(asked)
    chains = [block_keys(root_key("f", salt), [1, 2, 3, 4], 2) for salt in salts.values()]
    assert len({key for chain in chains for key in chain}) == 2 * len(asked)


@given(st.text(min_size=1, max_size=8), names)
def test_a_client_cannot_name_a_tenants_salt(tenant: str, salt: str | None) -> None:
    """Not even by giving the very salt that the tenant's requests have."""
    implied = salt_of(tenant, salt)
    assert salt_of(None, implied) != implied
    assert salt_of("", implied) != implied
    assert salt_of("another", implied) != implied


def test_nobody_in_particular_shares_with_all_and_it_stays_so() -> None:
    """Equal over starts and versions: keys of blocks on disks are made of it."""
    assert salt_of(None, None) == salt_of("", "") == ""
    assert salt_of("alice", None).startswith("15d7e48e627af014")
