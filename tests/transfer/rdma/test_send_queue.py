"""Chains, bounds and order of a send queue."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transfer.base import Op
from transfer.rdma.fabric import CHAIN, PairAddress, Runs
from transfer.rdma.queues import SendQueue, Work, runs_of
from transfer.scatter import rows


@dataclass
class RecordingPair:
    """Keeps what is posted."""

    number: int = 1
    first_packet: int = 1
    max_inline_bytes: int = 0
    posted: list[tuple[str, Runs, int | None]] = field(default_factory=list)

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        self.posted.append(("read", runs, None))

    def write(self, token: int, runs: Runs, local_key: int, remote_key: int, immediate: int | None) -> None:
        self.posted.append(("write", runs, immediate))

    def connect(self, peer: PairAddress) -> None: ...
    def receive(self, token: int) -> None: ...
    def fail(self) -> None: ...
    def close(self) -> None: ...


def work(owner: str, op: Op, count: int, immediate: int | None = None) -> Work[str]:
    return Work(owner, op, [(i, i, 1) for i in range(count)], 1, 2, immediate)


def test_only_the_last_chain_of_a_write_carries_the_number_of_its_grant() -> None:
    pair = RecordingPair()
    queue: SendQueue[str] = SendQueue(pair, 1, 4 * CHAIN)
    queue.submit(work("a", Op.WRITE, 2 * CHAIN + 1, immediate=7))
    assert [(len(runs), immediate) for _, runs, immediate in pair.posted] == [(CHAIN, None), (CHAIN, None), (1, 7)]
    assert [getattr(queue.completed(), "owner", None) for _ in range(3)] == [None, None, "a"]


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10), depth=st.integers(1, 4 * CHAIN))
def test_works_end_in_order_and_the_queue_is_never_overfull(sizes: list[int], depth: int) -> None:
    pair = RecordingPair()
    queue: SendQueue[str] = SendQueue(pair, 1, depth)
    for index, size in enumerate(sizes):
        queue.submit(work(str(index), Op.READ, size))
    ended, freed, done = [], 0, 0
    while done < len(pair.posted):
        assert sum(len(runs) for _, runs, _ in pair.posted) - freed <= depth
        freed += len(pair.posted[done][1])
        done += 1
        if (finished := queue.completed()) is not None:
            ended.append(int(finished.owner))
    assert ended == list(range(len(sizes)))
    assert freed == sum(sizes)


def test_what_was_given_up_is_posted_no_more() -> None:
    pair = RecordingPair()
    queue: SendQueue[str] = SendQueue(pair, 1, 1)
    queue.submit(work("a", Op.READ, 3))
    assert queue.give_up() == 1
    queue.completed()
    assert len(pair.posted) == 1


def test_runs_are_absolute_without_the_empty_ones_and_no_longer_than_a_message() -> None:
    runs = runs_of(rows((0, 100, 10), (50, 0, 0), (20, 200, 25)), 1000, 5000, 10)
    assert [tuple(run) for run in runs] == [(1000, 5100, 10), (1020, 5200, 10), (1030, 5210, 10), (1040, 5220, 5)]
    assert runs_of(np.empty((0, 3), dtype=np.int64), 0, 0, 10) == []
