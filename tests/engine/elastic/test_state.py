"""What is mapped, unmapped and handed over, and when: calls in, actions out."""

from __future__ import annotations

import pytest

from engine.elastic.actions import Grant, Map, Release, Reserve, Unmap
from engine.elastic.state import ElasticState
from tests.engine.elastic.shapes import paging, run, settle

NONE = Reserve(low=0, high=0, idle_s=0.0)
PAGES = 6  # of either model, 4 frames and 2 blocks each


def state(reserve: Reserve = NONE, **floors: int) -> ElasticState:
    """Models a and b, whose floors are given in pages, over a budget of `PAGES` pages."""
    made = ElasticState(4 * PAGES, reserve)
    for name in ("a", "b"):
        made.add(name, paging(PAGES), 4 * floors.get(name, 0), 4 * PAGES)
    return made


def allocate(pool: ElasticState, name: str, count: int) -> Grant:
    grant = pool.allocate(name, count)
    assert grant is not None
    run(pool, grant.actions)
    assert not grant.outstanding
    return grant


def held_pages(pool: ElasticState, name: str) -> int:
    return pool.models()[name][0].num_held


def test_blocks_may_be_used_once_their_pages_are_mapped() -> None:
    pool = state()
    grant = pool.allocate("a", 3)
    assert grant is not None
    assert len(grant.outstanding) == 2
    first, second = grant.actions
    pool.mapped(first)
    assert grant.outstanding == {second.page}
    pool.mapped(second)
    assert not grant.outstanding
    pool.validate()


def test_a_second_block_of_a_page_under_way_waits_for_the_same_mapping() -> None:
    pool = state()
    first, second = pool.allocate("a", 1), pool.allocate("a", 1)
    assert first is not None
    assert second is not None
    assert second.outstanding == first.outstanding
    assert not second.actions
    run(pool, first.actions)
    assert not second.outstanding


def test_blocks_come_from_the_fullest_page_so_that_the_others_empty() -> None:
    pool = ElasticState(12, NONE)
    pool.add("a", paging(3, blocks_per_page=4), 0, 12)
    blocks = allocate(pool, "a", 12).blocks
    pages = [sorted(b for b in blocks if b // 4 == page) for page in range(3)]
    pool.free("a", pages[0][:3] + pages[1][:2] + pages[2][:1])
    assert sorted(allocate(pool, "a", 3).blocks) == pages[1][:2] + pages[2][:1]
    assert pool.emptiest("a")[0] == 0


def test_an_emptied_page_is_unmapped_and_its_frames_go_to_who_needs_them() -> None:
    pool = state()
    blocks = allocate(pool, "a", 2 * PAGES).blocks
    assert pool.allocate("b", 1) is None
    pool.free("a", blocks[:2])
    (unmap,) = settle(pool, 0.0)
    assert isinstance(unmap, Unmap)
    grant = pool.allocate("b", 1)
    assert grant is not None
    (mapping,) = grant.actions
    assert set(mapping.frames) == set(unmap.frames)


def test_a_page_is_mapped_only_after_its_frames_have_left_their_old_place() -> None:
    """B is granted A's empty pages at once, and waits for them to be unmapped."""
    pool = state(Reserve(low=0, high=PAGES, idle_s=1.0))
    pool.free("a", allocate(pool, "a", 2 * PAGES).blocks)
    grant = pool.allocate("b", 4)
    assert grant is not None
    assert [type(action) for action in grant.actions] == [Unmap, Unmap]
    assert len(grant.outstanding) == 2
    done = run(pool, grant.actions)
    assert [type(action) for action in done] == [Unmap, Unmap, Map, Map]
    assert {f for a in done[:2] for f in a.frames} == {f for a in done[2:] for f in a.frames}


def test_those_idle_longest_give_back_first() -> None:
    pool = ElasticState(16, Reserve(low=0, high=9, idle_s=99.0))
    for name in ("a", "b", "c"):
        pool.add(name, paging(4), 0, 16)
    kept = {name: allocate(pool, name, 4).blocks for name in ("b", "a")}
    pool.free("b", kept["b"])
    pool.free("a", kept["a"])
    grant = pool.allocate("c", 3)
    assert grant is not None
    assert {action.model for action in grant.actions} == {"b"}


def test_the_reserve_is_filled_while_a_model_is_used_and_given_back_when_it_is_idle() -> None:
    pool = state(Reserve(low=2, high=3, idle_s=10.0))
    assert settle(pool, 0.0) == []  # nobody has used anything
    blocks = allocate(pool, "a", 8).blocks
    settle(pool, 1.0)
    assert held_pages(pool, "a") == 4 + 2
    pool.free("a", blocks)
    settle(pool, 2.0)
    assert held_pages(pool, "a") == 3
    assert pool.wake_at() == 12.0
    settle(pool, 11.9)
    assert held_pages(pool, "a") == 3
    settle(pool, 12.0)
    assert held_pages(pool, "a") == 0
    assert pool.wake_at() is None
    assert held_pages(pool, "b") == 0


def test_a_floor_stays_mapped_when_idle_and_cannot_be_taken() -> None:
    pool = state(a=2)
    pool.free("a", allocate(pool, "a", 6).blocks)
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 2
    assert pool.available("b") == 2 * (PAGES - 2)
    assert pool.allocate("b", 2 * (PAGES - 2) + 1) is None
    allocate(pool, "b", 2 * (PAGES - 2))
    assert pool.available("a") == 4


def test_a_floor_that_is_not_mapped_yet_is_kept_free() -> None:
    pool = state(a=2)
    allocate(pool, "b", pool.available("b"))
    assert held_pages(pool, "b") == PAGES - 2
    allocate(pool, "a", 4)


def test_a_lowered_ceiling_takes_effect_as_blocks_are_freed() -> None:
    pool = state()
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
    pool = state()
    pool.limit("a", 0, 4)
    assert pool.available("a") == pool.most("a") == 2
    pool.limit("a", 0, 12)
    assert pool.available("a") == pool.most("a") == 6


def test_a_raised_floor_is_met_as_others_free() -> None:
    pool = state(Reserve(low=0, high=PAGES, idle_s=99.0))
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
    pool = state()
    with pytest.raises(ValueError, match="floor"):
        pool.limit("a", floor, ceiling)
    assert pool.most("a") == 2 * PAGES
    with pytest.raises(ValueError, match="floor"):
        pool.add("c", paging(1), floor, ceiling)
    assert list(pool.models()) == ["a", "b"]


def test_floors_and_ceilings_count_whole_pages() -> None:
    pool = state()
    pool.limit("a", 5, 15)
    share = pool.models()["a"][1]
    assert (share.floor, share.ceiling) == (8, 12)
    pool.limit("a", 5, 7)
    assert (share.floor, share.ceiling) == (4, 4)


def test_while_a_model_waits_one_that_holds_more_gets_nothing_new() -> None:
    pool = state()
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
    pool = state()
    blocks = allocate(pool, "a", 6).blocks
    allocate(pool, "b", 6)
    pool.want("a", 2)
    pool.want("b", 2)
    pool.free("a", blocks[:2])
    assert pool.available("a") == 2


def test_who_holds_most_is_asked_to_give_back_and_never_below_its_floor() -> None:
    pool = state()
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
    pool = state(Reserve(low=0, high=PAGES, idle_s=99.0))
    blocks = allocate(pool, "a", 2 * PAGES).blocks
    pool.free("a", blocks[:2])
    assert settle(pool, 0.0) == []
    pool.want("b", 4)
    assert [action.model for action in settle(pool, 0.0)] == ["a"]


def test_a_pinned_page_is_mapped_and_stays_when_it_is_empty() -> None:
    pool = state()
    pin = pool.pin("a", [1, 3])
    assert pin is not None
    run(pool, pin.actions)
    blocks = allocate(pool, "a", 12).blocks
    pool.free("a", blocks)
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 2
    assert pool.available("b") == 2 * (PAGES - 2)
    pool.unpin("a", [1, 3])
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 0


def test_pages_are_pinned_as_often_as_somebody_asks() -> None:
    pool = state()
    for _ in range(2):
        pin = pool.pin("a", [0])
        assert pin is not None
        run(pool, pin.actions)
    pool.unpin("a", [0])
    assert settle(pool, 100.0) == []
    pool.unpin("a", [0])
    assert len(settle(pool, 100.0)) == 1


def test_what_there_is_no_room_for_cannot_be_pinned() -> None:
    pool = state()
    pool.limit("a", 0, 8)
    assert pool.pin("a", [0, 1, 2]) is None
    assert held_pages(pool, "a") == 0


def test_a_page_that_the_machine_refuses_costs_the_whole_allocation_and_nothing_else() -> None:
    pool = state()
    kept = allocate(pool, "a", 2).blocks
    grant = pool.allocate("a", 4)
    assert grant is not None
    first, second = grant.actions
    pool.mapped(first)
    assert pool.not_mapped(second) == []
    assert grant.failed
    assert not grant.outstanding
    pool.validate()
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 1
    pool.free("a", kept)


def test_a_pin_that_the_machine_refuses_is_no_pin() -> None:
    pool = state()
    pin = pool.pin("a", [0, 1])
    assert pin is not None
    pool.not_mapped(pin.actions[0])
    run(pool, pin.actions[1:])
    assert pin.failed
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 0


def test_a_block_that_is_not_held_cannot_be_freed() -> None:
    pool = state()
    blocks = allocate(pool, "a", 3).blocks
    with pytest.raises(ValueError, match="twice"):
        pool.free("a", [blocks[0], blocks[0]])
    with pytest.raises(ValueError, match="not in use"):
        pool.free("b", blocks[:1])
    pool.free("a", blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.free("a", blocks[:1])
    pool.validate()


def test_a_model_ends_when_it_holds_nothing_and_its_floor_is_free_again() -> None:
    pool = state(a=2)
    blocks = allocate(pool, "a", 2).blocks
    with pytest.raises(ValueError, match="in use"):
        pool.end("a")
    pool.free("a", blocks)
    pool.end("a")
    assert pool.allocate("a", 1) is None
    settle(pool, 0.0)
    pool.remove("a")
    assert pool.available("b") == 2 * PAGES


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
    pool = state()
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
    pool = state()
    allocate(pool, "a", 2)
    (released,) = pool.resize(8)
    assert pool.resize(16) == []
    assert isinstance(released, Release)
    allocate(pool, "a", 6)
    assert not set(pool.models()["a"][0].all_frames()) & set(released.frames)
    pool.validate()


def test_frames_that_were_promised_are_not_let_go() -> None:
    pool = state(Reserve(low=0, high=PAGES, idle_s=99.0))
    pool.free("a", allocate(pool, "a", 2 * PAGES).blocks)
    grant = pool.allocate("b", 4)
    assert grant is not None
    assert pool.resize(4) == []
    pool.validate()
    run(pool, grant.actions)
    assert not grant.outstanding


def test_a_budget_below_the_floors_is_refused() -> None:
    pool = state(a=2, b=1)
    with pytest.raises(ValueError, match="floors"):
        pool.resize(11)
    assert pool.resize(12)
    with pytest.raises(ValueError, match="floors"):
        state().resize(0)


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
