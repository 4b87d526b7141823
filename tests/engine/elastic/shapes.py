"""Small layouts and pools for these tests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.elastic.actions import Action, Grant, Map, Reserve, Unmap
from engine.elastic.paging import Paging
from engine.elastic.state import ElasticState
from protocol.layout import KvLayout

PAGE = 4096  # the kernel's

# 2 layers, pieces of 2 KiB: a page of 4 KiB frames is 4 frames and holds 2 blocks.
LAYOUT = KvLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")

NO_RESERVE = Reserve(low=0, high=0, idle_s=0.0)
PAGES = 6  # of each of `two_models`, 4 frames and 2 blocks a page


def paging(num_pages: int, blocks_per_page: int = 2, frames_per_page: int = 4) -> Paging:
    """Pages of that many blocks and frames; what a frame is does not matter."""
    return Paging(
        num_pages=num_pages,
        num_slabs=frames_per_page,
        blocks_per_page=blocks_per_page,
        span_bytes=PAGE,
        frame_bytes=PAGE,
    )


def two_models(reserve: Reserve = NO_RESERVE, **floors: int) -> ElasticState:
    """Models a and b, whose floors are given in pages, over a budget of `PAGES` pages."""
    made = ElasticState(4 * PAGES, reserve)
    for name in ("a", "b"):
        made.add(name, paging(PAGES), 4 * floors.get(name, 0), 4 * PAGES)
    return made


def run(state: ElasticState, actions: Sequence[Action]) -> list[Action]:
    """Runs actions and what follows from them; all that were run, in order."""
    pending, done = list(actions), []
    while pending:
        action = pending.pop(0)
        done.append(action)
        if isinstance(action, Map):
            pending += state.mapped(action)
        elif isinstance(action, Unmap):
            pending += state.unmapped(action)
        else:
            pending += state.released(action)
        state.validate()
    return done


def settle(state: ElasticState, now: float) -> list[Action]:
    """Does everything that is to be done in the background at this time."""
    done: list[Action] = []
    while (action := state.next_action(now)) is not None:
        done += run(state, [action])
    return done


def allocate(state: ElasticState, name: str, count: int) -> Grant:
    """Blocks that can be had, with their pages mapped."""
    grant = state.allocate(name, count)
    assert grant is not None
    run(state, grant.actions)
    assert not grant.outstanding
    return grant


def held_pages(state: ElasticState, name: str) -> int:
    return state.models()[name][0].num_held
