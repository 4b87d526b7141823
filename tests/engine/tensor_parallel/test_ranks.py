"""Sums and gathers over ranks, and what they say when one is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tensor_parallel import steps
from engine.tensor_parallel.shared import Ranks
from protocol.errors import PeerLost
from tests.engine.tensor_parallel.teams import sharing
from tests.thoroughness import examples


@contextmanager
def team_of(size: int, patience_s: float = 60.0) -> Iterator[list[Ranks]]:
    """Rank 0 is connected to each other one."""
    pairs = [steps.pair() for _ in range(1, size)]
    try:
        yield sharing(size, pairs, patience_s)
    finally:
        for own, other in pairs:
            own.close()
            other.close()


def at_once(works: list[Callable[[], None]]) -> None:
    """All at the same time, to their ends."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def check(ranks: list[Ranks], rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Two sums, then a gather: everybody has the same bits, which are those of a sum in the order of ranks."""
    size = len(ranks)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    parts = torch.randn(2, size, rows, width, generator=generator).to(dtype)
    expected = hidden
    for own in parts:
        total = own[0].float()
        for other in own[1:]:
            total = total + other.float()
        expected = (expected.float() + total).to(dtype)
    found = [hidden.clone() for _ in ranks]
    gathered: list[list[torch.Tensor]] = [[] for _ in ranks]

    def work(rank: int) -> None:
        for own in parts:
            ranks[rank].add(found[rank], own[rank])
        gathered[rank] = ranks[rank].gather(parts[0][rank].float().contiguous())

    at_once([lambda n=n: work(n) for n in range(size)])  # type: ignore[misc]
    for each in found:
        assert torch.equal(each, expected)
    assert torch.equal(torch.stack(gathered[0]), parts[0].float())
    assert not any(gathered[1:])


@given(
    size=st.integers(1, 5),
    rows=st.integers(1, 20),
    width=st.sampled_from([1, 15, 16, 33, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(30), deadline=None)
def test_sums_through_shared_memory_are_exact_and_equal(
    size: int, rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    """Parts larger than what is left at once, too."""
    with team_of(size) as ranks:
        check(ranks, rows, width, dtype, seed)


def test_who_waits_for_a_rank_that_has_died_is_told() -> None:
    """Its end of the socket is closed by whatever ended it."""
    with team_of(2) as (first, second):
        hidden = torch.zeros(4)
        second._sockets[0].shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost, match="has died"):
            first.add(hidden, torch.ones(4))


def test_who_waits_for_a_rank_that_does_not_come_is_told() -> None:
    with team_of(2, patience_s=0.05) as (first, _), pytest.raises(PeerLost, match="not come"):
        first.gather(torch.ones(4))
