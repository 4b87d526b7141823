"""Chains, bounds and order of a send queue."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.fake_fabric import PORT, FakePair, Request, Wire
from transfer.base import Op
from transfer.rdma.fabric import CHAIN
from transfer.rdma.queues import SendQueue, Work, runs_of
from transfer.scatter import rows


def queue_of(depth: int) -> tuple[SendQueue[int], deque[tuple[FakePair, Request]]]:
    """With what it has posted, none of which ends by itself."""
    wire, posted = Wire(), deque[tuple[FakePair, Request]]()
    wire.frozen = posted
    pair = wire.open(PORT).make_queue_pair(None, send_depth=depth, receive_depth=1, serves=False)
    return SendQueue(pair, 1, depth), posted


def work(owner: int, count: int) -> Work[int]:
    return Work(owner, Op.READ, [(i, i, 1) for i in range(count)], 1, 2)


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10), depth=st.integers(1, 4 * CHAIN))
def test_works_end_in_order_and_the_queue_is_never_overfull(sizes: list[int], depth: int) -> None:
    queue, posted = queue_of(depth)
    for owner, size in enumerate(sizes):
        queue.submit(work(owner, size))
    ended, freed, done = [], 0, 0
    while done < len(posted):
        assert sum(len(request.runs) for _, request in posted) - freed <= depth
        freed += len(posted[done][1].runs)
        done += 1
        if (finished := queue.completed()) is not None:
            ended.append(finished.owner)
    assert ended == list(range(len(sizes)))
    assert freed == sum(sizes)


def test_what_was_given_up_is_posted_no_more() -> None:
    queue, posted = queue_of(1)
    queue.submit(work(0, 3))
    assert queue.give_up() == 1
    queue.completed()
    assert len(posted) == 1


def test_runs_are_absolute_without_the_empty_ones_and_no_longer_than_a_message() -> None:
    runs = runs_of(rows((0, 100, 10), (50, 0, 0), (20, 200, 25)), 1000, 5000, 10)
    assert [tuple(run) for run in runs] == [(1000, 5100, 10), (1020, 5200, 10), (1030, 5210, 10), (1040, 5220, 5)]
    assert runs_of(np.empty((0, 3), dtype=np.int64), 0, 0, 10) == []
