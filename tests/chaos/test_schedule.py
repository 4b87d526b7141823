"""What happens to whom is the seed's choice alone, and over before the end."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tests.chaos.schedule import QUIET_END_S, Kind, schedule

VICTIMS = ["conductor", "decode-0", "gateway", "prefill-0", "store-0"]


@given(seed=st.integers(0, 10_000), minutes=st.floats(0.5, 30.0))
def test_faults_are_in_order_and_over_before_the_end(seed: int, minutes: float) -> None:
    duration_s = minutes * 60
    faults = schedule(seed, duration_s, VICTIMS)
    assert faults == schedule(seed, duration_s, VICTIMS)
    assert faults
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    assert all(f.at_s + f.lasts_s <= duration_s - QUIET_END_S + 1e-9 for f in faults)
    assert all(f.victim == "store-0" for f in faults if f.kind is Kind.DISK)


def test_where_nobody_has_a_disk_none_fails() -> None:
    assert all(f.kind is not Kind.DISK for f in schedule(1, 600.0, ["decode-0", "prefill-0"]))


def test_half_an_hour_has_all_kinds_for_all_victims() -> None:
    faults = schedule(0, 1_800.0, VICTIMS)
    assert {f.kind for f in faults} == set(Kind)
    assert {f.victim for f in faults} == set(VICTIMS)
