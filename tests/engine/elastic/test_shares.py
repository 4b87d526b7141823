"""How models share a budget of pages: floors, ceilings, wishes and budgets that change. Calls in, actions out."""

from __future__ import annotations

import pytest

from engine.elastic.actions import Release, Reserve
from engine.elastic.state import ElasticState
from tests.engine.elastic.shapes import (
    PAGES,
    allocate,
    held_pages,
    paging,
    run,
    settle,
    two_models,
)


def test_a_floor_stays_mapped_when_idle_and_cannot_be_taken() -> None:
    pool = two_models(a=2)
    pool.free("a", allocate(pool, "a", 6).blocks)
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 2
    assert pool.available("b") == 2 * (PAGES - 2)
    assert pool.allocate("b", 2 * (PAGES - 2) + 1) is None
    allocate(pool, "b", 2 * (PAGES - 2))
    assert pool.available("a") == 4


def test_a_floor_that_is_not_mapped_yet_is_kept_free() -> None:
    pool = two_models(a=2)
    allocate(pool, "b", pool.available("b"))
    assert held_pages(pool, "b") == PAGES - 2
    allocate(pool, "a", 4)


def test_a_lowered_ceiling_takes_effect_as_blocks_are_freed() -> None:
    pool = two_models()
    blocks = allocate(pool, "a", 8).blocks
    pool.limit("a", 0, 8)
    assert pool.models()["a"][1].excess == 8
    assert pool.available("a") == 0
    pool.free("a", blocks[:2])
    settle(pool, 0.0)
    assert pool.models()["a"][1].excess == 4
    assert pool.allocate("a", 1) is None
    pool.free("a", blocks[2:6])
    settle(pool, 0.0)
    assert pool.models()["a"][1].excess == 0
    assert len(allocate(pool, "a", 2).blocks) == 2
    assert pool.available("a") == 0


def test_a_raised_ceiling_can_be_used_at_once() -> None:
    pool = two_models()
    pool.limit("a", 0, 4)
    assert pool.available("a") == pool.most("a") == 2
    pool.limit("a", 0, 12)
    assert pool.available("a") == pool.most("a") == 6


def test_a_raised_floor_is_met_as_others_free() -> None:
    pool = two_models(Reserve(low=0, high=PAGES, idle_s=99.0))
    blocks = allocate(pool, "b", 2 * PAGES).blocks
    pool.limit("a", 8, 24)
    assert pool.available("a") == 0
    pool.free("b", blocks[:4])
    settle(pool, 0.0)
    assert pool.available("b") == 0  # b may not take them again
    assert pool.available("a") == 4


@pytest.mark.parametrize(("floor", "ceiling"), [(-1, 4), (8, 4), (25, 30)])
def test_figures_that_cannot_be_kept_are_refused_and_change_nothing(
    floor: int, ceiling: int
) -> None:
    pool = two_models()
    with pytest.raises(ValueError, match="floor"):
        pool.limit("a", floor, ceiling)
    assert pool.most("a") == 2 * PAGES
    with pytest.raises(ValueError, match="floor"):
        pool.add("c", paging(1), floor, ceiling)
    assert list(pool.models()) == ["a", "b"]


def test_floors_and_ceilings_count_whole_pages() -> None:
    pool = two_models()
    pool.limit("a", 5, 15)
    share = pool.models()["a"][1]
    assert (share.floor, share.ceiling) == (8, 12)
    pool.limit("a", 5, 7)
    assert (share.floor, share.ceiling) == (4, 4)


def test_while_a_model_waits_one_that_holds_more_gets_nothing_new() -> None:
    pool = two_models()
    blocks = allocate(pool, "a", 8).blocks
    allocate(pool, "b", 4)
    pool.want("b", 2)
    assert pool.available("a") == 0
    pool.free("a", blocks[:2])
    allocate(pool, "b", 2)  # ends the wish
    assert pool.available("a") == 0  # nothing is free
    pool.free("a", blocks[2:4])
    assert pool.available("a") == 2


def test_of_two_that_wait_and_hold_alike_either_may_go_first() -> None:
    pool = two_models()
    blocks = allocate(pool, "a", 6).blocks
    allocate(pool, "b", 6)
    pool.want("a", 2)
    pool.want("b", 2)
    pool.free("a", blocks[:2])
    assert pool.available("a") == 2


def test_who_holds_most_is_asked_to_give_back_and_never_below_its_floor() -> None:
    pool = two_models()
    allocate(pool, "a", 10)
    allocate(pool, "b", 2)
    pool.want("b", 4)
    assert pool.asked_back("a") == 4
    assert pool.asked_back("b") == 0
    pool.limit("a", 16, 24)
    assert pool.asked_back("a") == 2
    pool.want("b", 0)
    assert pool.asked_back("a") == 0


def test_empty_pages_go_back_at_once_when_somebody_waits() -> None:
    pool = two_models(Reserve(low=0, high=PAGES, idle_s=99.0))
    blocks = allocate(pool, "a", 2 * PAGES).blocks
    pool.free("a", blocks[:2])
    assert settle(pool, 0.0) == []
    pool.want("b", 4)
    assert [action.model for action in settle(pool, 0.0)] == ["a"]


def test_a_floor_is_not_met_out_of_what_its_model_would_have_to_wait_for() -> None:
    """B takes what is free and A's empty page too, so that C's floor stays free."""
    pool = ElasticState(24, Reserve(low=0, high=9, idle_s=99.0))
    for name, floor in (("a", 0), ("b", 0), ("c", 8)):
        pool.add(name, paging(6), floor, 24)
    pool.free("a", allocate(pool, "a", 2).blocks)
    allocate(pool, "b", pool.available("b"))
    assert held_pages(pool, "a") == 0
    assert pool.frames.num_free == 8
    assert pool.budget.committed == 24


def test_a_smaller_budget_lets_go_of_what_is_free_and_of_the_rest_as_it_is_freed() -> None:
    pool = two_models()
    blocks = allocate(pool, "a", 6).blocks
    (first,) = pool.resize(4)
    assert isinstance(first, Release)
    assert len(first.frames) == 12
    assert pool.available("a") == pool.available("b") == 0
    assert pool.asked_back("a") == 4
    pool.free("a", blocks[:4])
    *_, last = settle(pool, 0.0)
    assert isinstance(last, Release)
    assert (pool.asked_back("a"), pool.budget.free) == (0, 0)
    assert not set(first.frames) & set(last.frames)
    pool.validate()


def test_a_larger_budget_can_be_used_at_once_and_what_was_let_go_is_never_used_again() -> None:
    """Its number may still be on its way to the machine."""
    pool = two_models()
    allocate(pool, "a", 2)
    (released,) = pool.resize(8)
    assert pool.resize(16) == []
    assert isinstance(released, Release)
    allocate(pool, "a", 6)
    assert not set(pool.models()["a"][0].all_frames()) & set(released.frames)
    pool.validate()


def test_frames_that_were_promised_are_not_let_go() -> None:
    pool = two_models(Reserve(low=0, high=PAGES, idle_s=99.0))
    pool.free("a", allocate(pool, "a", 2 * PAGES).blocks)
    grant = pool.allocate("b", 4)
    assert grant is not None
    assert pool.resize(4) == []
    pool.validate()
    run(pool, grant.actions)
    assert not grant.outstanding


def test_a_budget_below_the_floors_is_refused() -> None:
    pool = two_models(a=2, b=1)
    with pytest.raises(ValueError, match="floors"):
        pool.resize(11)
    assert pool.resize(12)
    with pytest.raises(ValueError, match="floors"):
        two_models().resize(0)


def test_models_of_different_shapes_share_frames() -> None:
    """Pages of 4 and of 6 frames: what is left over stays free."""
    pool = ElasticState(13, Reserve(low=0, high=9, idle_s=99.0))
    pool.add("a", paging(3), 0, 13)
    pool.add("b", paging(2, frames_per_page=6), 0, 13)
    pool.free("a", allocate(pool, "a", 6).blocks)
    assert pool.available("b") == 4
    allocate(pool, "b", 4)
    assert pool.frames.num_free == 1
    assert pool.available("a") == 0
