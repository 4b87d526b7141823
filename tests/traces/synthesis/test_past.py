"""Chains keep the law of ids, and the past remembers what it should and no more."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from traces.synthesis.past import Past, Prompt, Wish
from traces.synthesis.trunks import BlockIds, Chain


def prompt(at_s: float, chain: Chain, *, shared: int = 0, uses: int = 1, trunk: int | None = None) -> Prompt:
    return Prompt(
        arrived_s=at_s,
        chain=chain,
        input_length=len(chain) * 512,
        whole=len(chain),
        shared=shared,
        uses=uses,
        trunk=None if trunk is None else (trunk, 0),
    )


def wish(blocks: int, *, left: int = 0, turn: int = 0) -> Wish:
    """Of the first second, a hundred later."""
    return Wish(trunk=None, blocks=blocks, most=1_000, left=left, arrived_s=0, now_s=100, turn=turn, uses=1)


@given(st.integers(0, 1_000), st.integers(1, 30))
def test_only_the_latest_prompts_are_remembered(seed: int, limit: int) -> None:
    random, ids, past = Random(seed), BlockIds(), Past(limit)
    for second in range(100):
        length = random.randrange(1, 6)
        trunk = random.choice([None, 1, 2])
        chain, shared, uses = ids.extend((), length), random.randrange(length), random.randrange(1, 3)
        past.add(prompt(second, chain, shared=shared, uses=uses, trunk=trunk))
        past.validate()
    assert len(past) == limit
    found = past.private(wish(1, left=1))
    assert found is None or found.arrived_s >= 100 - limit


def test_a_prompt_that_another_has_extended_is_not_extended_again() -> None:
    past, ids = Past(), BlockIds()
    past.add(prompt(0, ids.extend((), 4)))
    first = past.session(wish(4, turn=1))
    assert first is not None
    first.taken = 4
    assert past.session(wish(4, turn=1)) is None
    assert past.private(wish(3, left=1)) is None


def test_a_popular_prefix_is_found_by_its_depth() -> None:
    past, ids = Past(), BlockIds()
    past.add(prompt(0, ids.extend((), 9), shared=3, uses=5))
    past.add(prompt(1, ids.extend((), 9), shared=6, uses=5))
    found = past.popular(wish(6))
    assert found is not None
    assert found.arrived_s == 1
