"""Stores are told to copy what placements waited for, and to let it go when it is cold: the pure state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conductor.events import (
    CopyDue,
    DropDue,
    Heartbeat,
    Load,
)
from conductor.replication.planner import LOOK_BURST_S, LOOK_EVERY_S
from kvstore.replication.ledger import UNDER_WAY_S
from protocol.errors import ConfigError
from protocol.ids import InstanceId
from protocol.keys import BlockKey
from tests.conductor.cluster import chain
from tests.conductor.replica_pool import CAPACITY, STORES, TERMS, Pool

BLOCKS = 20  # of the hot prompt, 10 tokens each


def copies(due: Sequence[CopyDue | DropDue]) -> list[tuple[str, tuple[BlockKey, ...]]]:
    return [(d.target.instance_id, d.keys) for d in due if isinstance(d, CopyDue)]


HOT = chain("hot", BLOCKS)


def hot_pool() -> Pool:
    """A chain in one store, for which others' requests have waited."""
    pool = Pool()
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=12)
    return pool


def test_what_many_waited_for_is_copied_whole_and_parents_first_to_another_host() -> None:
    due = hot_pool().look()
    assert all(isinstance(d, CopyDue) for d in due)
    (store, keys), *_ = copies(due)
    assert store in ("s1", "s2")
    assert keys == HOT
    sources = {step.source.instance_id for d in due if isinstance(d, CopyDue) for step in d.steps}
    assert sources == {"s0"}


def test_it_costs_less_than_it_saved() -> None:
    for due in hot_pool().look():
        assert isinstance(due, CopyDue)
        assert due.saved_s > TERMS.margin * due.cost_s


def test_one_replica_at_a_time_and_what_was_answered_is_not_answered_again() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    assert pool.look() == []
    pool.finish_all()
    assert pool.look(later_s=TERMS.window_s) == []


def test_few_requests_are_no_reason() -> None:
    pool = Pool()
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=3)
    assert pool.look() == []


def test_one_request_after_a_burst_of_others_is_no_reason() -> None:
    """Of the placements of one moment only so many are looked at, and the next one stands for the others: for their
    seconds, and not for as many uses of its own prefix."""
    pool = Pool()
    others, num_looks = chain("others", BLOCKS), round(LOOK_BURST_S / LOOK_EVERY_S)
    for keys in (HOT, others):
        pool.put("s0", keys)
    for number in range(num_looks + 50):
        pool.cluster.place(f"burst-{number}", keys=others, tokens=BLOCKS * 10 + 5)
    pool.ask_for(HOT)
    assert not any(set(keys) & set(HOT) for _, keys in copies(pool.look()))


def test_requests_of_one_moment_all_count() -> None:
    pool = Pool()
    pool.put("s0", HOT)
    for number in range(20):
        pool.cluster.place(f"burst-{number}", keys=HOT, tokens=BLOCKS * 10 + 5)
    assert {keys for _, keys in copies(pool.look())} == {HOT}


def test_what_nobody_waited_for_is_left_where_it_is() -> None:
    """Each request ends before the next comes, so that the holder is always free."""
    pool = Pool()
    pool.put("s0", HOT)
    for _ in range(20):
        pool.ask_for(HOT)
        pool.finish_all()
    assert pool.look() == []


def test_old_demand_is_forgotten() -> None:
    pool = hot_pool()
    assert pool.look(later_s=TERMS.window_s + 1) == []


def test_only_the_part_that_many_share_is_copied() -> None:
    pool = Pool()
    shared = chain("system", 10)
    for number in range(12):
        own = (*shared, *chain(f"own-{number}", 5))
        pool.put("s0", own)
        pool.ask_for(own)
    assert {keys for _, keys in copies(pool.look())} == {shared}


def test_a_failed_copy_is_tried_with_another_store() -> None:
    pool = hot_pool()
    [due] = pool.look()
    assert isinstance(due, CopyDue)
    pool.settle(due, succeeded=False)
    pool.ask_for(HOT, times=12)
    [other] = pool.look()
    assert isinstance(other, CopyDue)
    assert other.target.instance_id != due.target.instance_id


def test_nothing_is_put_behind_blocks_that_are_still_on_their_way() -> None:
    """A store loses the head of a chain whose middle is being copied into it: the head is copied, and not the end as
    well, which nobody would find were the middle not to arrive."""
    pool = Pool()
    pool.put("s0", HOT)
    pool.put("s1", HOT[:3])
    pool.put("s2", HOT)
    pool.ask_for(HOT[:6], times=40)
    assert copies(pool.look()) == [("s1", HOT[3:6])]
    pool.lose("s1", HOT[2::-1])
    pool.ask_for(HOT, times=40)
    assert copies(pool.look()) == [("s1", HOT[:3])]


@pytest.mark.parametrize("succeeded", [False, True])
def test_a_copy_that_settles_after_it_was_given_up_says_nothing_of_the_one_after_it(
    succeeded: bool,
) -> None:
    """The first was asked for long ago, the same blocks again since: the second one is still expected."""
    pool = Pool(replace(TERMS, least_hits=2))
    pool.put("s0", HOT)
    pool.put("s2", HOT)
    pool.ask_for(HOT, times=40)
    [first] = pool.look()
    pool.look(later_s=UNDER_WAY_S)
    pool.ask_for(HOT, times=40)
    [second] = pool.look()
    assert isinstance(first, CopyDue)
    assert isinstance(second, CopyDue)
    assert (first.target, first.keys) == (second.target, second.keys)
    pool.settle(first, succeeded=succeeded)
    pool.look(later_s=TERMS.window_s)
    pool.ask_for(HOT, times=40)
    assert pool.look() == []
    assert pool.cluster.state.num_replicas == len(second.keys)


def test_a_cold_replica_is_dropped_children_first_and_the_original_stays() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    pool.finish_all()
    [drop] = pool.look(later_s=TERMS.cool_s + 1)
    assert isinstance(drop, DropDue)
    assert isinstance(due, CopyDue)
    assert drop.store.instance_id == due.target.instance_id
    assert drop.keys == HOT[::-1]
    pool.carry_out(drop)
    assert set(HOT) <= set(pool.held["s0"])
    assert pool.look(later_s=TERMS.cool_s) == []


def test_use_keeps_a_replica() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    assert isinstance(due, CopyDue)
    for _ in range(5):
        pool.finish_all()
        pool.ask_for(HOT, times=12)
        assert not any(
            isinstance(d, DropDue) and d.store == due.target for d in pool.look(later_s=50.0)
        )


def test_a_replica_that_has_become_the_only_one_stays() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    pool.finish_all()
    pool.lose("s0", HOT)
    assert pool.look(later_s=TERMS.cool_s + 1) == []


def test_a_replica_on_which_a_conversation_went_on_stays() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    assert isinstance(due, CopyDue)
    pool.put(due.target.instance_id, (*HOT, *chain("later", 1)))
    pool.finish_all()
    assert pool.look(later_s=TERMS.cool_s + 1) == []


def test_two_replicas_that_cool_together_leave_one_where_the_original_has_gone() -> None:
    """The second is asked before the first has said that its blocks are gone."""
    pool = hot_pool()
    [first] = pool.look()
    pool.carry_out(first)
    for _ in range(3):
        pool.ask_for(HOT, times=20)
        for due in pool.look(later_s=TERMS.window_s / 2):
            pool.carry_out(due)
    assert all(set(HOT) <= set(pool.held[store]) for store in STORES)
    pool.finish_all()
    pool.lose("s0", HOT)
    drops = pool.look(later_s=TERMS.cool_s + 1)
    assert len(drops) == 1
    assert pool.look(later_s=1.0) == []


def test_a_store_takes_no_more_replicas_than_its_share() -> None:
    pool = Pool(replace(TERMS, store_share=0.005))  # 5 of 1,000 blocks
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=60)
    assert {len(keys) for _, keys in copies(pool.look())} == {5}


def test_a_draining_store_takes_none() -> None:
    pool = hot_pool()
    for store in ("s1", "s2"):
        pool.cluster.send(
            Heartbeat(
                instance_id=InstanceId(store), epoch=1, draining=True,
                load=Load(capacity_bytes=CAPACITY),
            )
        )  # fmt: skip
    assert pool.look() == []


def test_explain_tells_how_many_blocks_were_near_because_of_it() -> None:
    pool = hot_pool()
    for _ in range(3):
        for due in pool.look():
            pool.carry_out(due)
        pool.ask_for(HOT, times=12)
    decisions = [pool.cluster.state.explain(f"r{n}") for n in range(1, pool.num_placed + 1)]  # type: ignore[arg-type]
    found = [d for d in decisions if d is not None and d.replica_blocks]
    assert found
    for decision in found:
        assert decision.replica_blocks <= sum(number for _, _, number in decision.sources)


def test_nothing_is_copied_unless_wished() -> None:
    pool = Pool(terms=None)
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=50)
    assert pool.look() == []


@pytest.mark.parametrize(
    "change", [{"least_hits": 0}, {"cool_s": 0.0}, {"store_share": 1.5}, {"busy_share": 0.0}]
)
def test_terms_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(TERMS, **change)  # type: ignore[arg-type]
