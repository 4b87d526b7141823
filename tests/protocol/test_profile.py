"""When prompts share a step: only where that is less waiting in all, which a sum over all of them can tell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.profile import PrefillProfile


@given(
    c0=st.floats(0, 0.1),
    c1=st.floats(1e-6, 1e-2),
    num_tokens=st.integers(1, 512),
    num_delayed=st.integers(1, 20),
    num_behind=st.integers(0, 40),
)
def test_a_prompt_joins_where_the_first_tokens_of_all_come_sooner_in_sum(
    c0: float, c1: float, num_tokens: int, num_delayed: int, num_behind: int
) -> None:
    """Joined: those who end with the step wait for it too, it and all behind it are spared a constant."""
    profile = PrefillProfile(c0=c0, c1=c1, c2=0.0)
    own_s = c1 * num_tokens
    joined_s = (num_delayed + 1 + num_behind) * own_s
    apart_s = (1 + num_behind) * (c0 + own_s)
    joins = profile.joins(num_tokens, 0, num_delayed=num_delayed, num_waiting=1 + num_behind)
    if abs(joined_s - apart_s) > 1e-12:
        assert joins == (joined_s < apart_s)


def test_without_a_constant_per_step_nobody_waits_for_another_prompt() -> None:
    profile = PrefillProfile(c0=0.0, c1=1e-3, c2=0.0)
    assert not profile.joins(1, 0, num_delayed=1, num_waiting=100)
