"""Which pages are mapped, unmapped and handed over for blocks and pins, and when: calls in, actions out."""

from __future__ import annotations

import pytest

from engine.elastic.actions import Map, Reserve, Unmap
from engine.elastic.state import ElasticState
from tests.engine.elastic.shapes import (
    NO_RESERVE,
    PAGES,
    allocate,
    held_pages,
    paging,
    run,
    settle,
    two_models,
)


def test_blocks_may_be_used_once_their_pages_are_mapped() -> None:
    pool = two_models()
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
    pool = two_models()
    first, second = pool.allocate("a", 1), pool.allocate("a", 1)
    assert first is not None
    assert second is not None
    assert second.outstanding == first.outstanding
    assert not second.actions
    run(pool, first.actions)
    assert not second.outstanding


def test_blocks_come_from_the_fullest_page_so_that_the_others_empty() -> None:
    pool = ElasticState(12, NO_RESERVE)
    pool.add("a", paging(3, blocks_per_page=4), 0, 12)
    blocks = allocate(pool, "a", 12).blocks
    pages = [sorted(b for b in blocks if b // 4 == page) for page in range(3)]
    pool.free("a", pages[0][:3] + pages[1][:2] + pages[2][:1])
    assert sorted(allocate(pool, "a", 3).blocks) == pages[1][:2] + pages[2][:1]
    assert pool.emptiest("a")[0] == 0


def test_an_emptied_page_is_unmapped_and_its_frames_go_to_who_needs_them() -> None:
    pool = two_models()
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
    pool = two_models(Reserve(low=0, high=PAGES, idle_s=1.0))
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
    pool = two_models(Reserve(low=2, high=3, idle_s=10.0))
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


def test_a_pinned_page_is_mapped_and_stays_when_it_is_empty() -> None:
    pool = two_models()
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
    pool = two_models()
    for _ in range(2):
        pin = pool.pin("a", [0])
        assert pin is not None
        run(pool, pin.actions)
    pool.unpin("a", [0])
    assert settle(pool, 100.0) == []
    pool.unpin("a", [0])
    assert len(settle(pool, 100.0)) == 1


def test_what_there_is_no_room_for_cannot_be_pinned() -> None:
    pool = two_models()
    pool.limit("a", 0, 8)
    assert pool.pin("a", [0, 1, 2]) is None
    assert held_pages(pool, "a") == 0


def test_a_page_that_the_machine_refuses_costs_the_whole_allocation_and_nothing_else() -> None:
    pool = two_models()
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
    pool = two_models()
    pin = pool.pin("a", [0, 1])
    assert pin is not None
    pool.not_mapped(pin.actions[0])
    run(pool, pin.actions[1:])
    assert pin.failed
    settle(pool, 100.0)
    assert held_pages(pool, "a") == 0


def test_a_block_that_is_not_held_cannot_be_freed() -> None:
    pool = two_models()
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
    pool = two_models(a=2)
    blocks = allocate(pool, "a", 2).blocks
    with pytest.raises(ValueError, match="in use"):
        pool.end("a")
    pool.free("a", blocks)
    pool.end("a")
    assert pool.allocate("a", 1) is None
    settle(pool, 0.0)
    pool.remove("a")
    assert pool.available("b") == 2 * PAGES
