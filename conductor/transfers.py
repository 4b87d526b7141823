"""Prefixes on their way from store nodes to prefill instances, as the book of flows sees them.

A placement's reads begin with it and are over with its first token or its end; what should have arrived before that
delays nobody any more (`conductor.cost.transfer`). An endpoint keeps its row of the book as long as it is a member; its
table says which (`link`). Pure; knows no policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from conductor.columns import Floats, Ints
from conductor.cost.bandwidth import Bandwidths
from conductor.cost.transfer import TransferBook
from protocol.ids import RequestId

# The book's clock ticks this coarsely: moving all flows on costs as much as a placement, and a prefix takes longer.
TICK_S = 0.005
_HOST_MASK = (1 << 62) - 1  # of a digest, to fit into a column of signed numbers


class Transfers:
    """Of all requests in flight."""

    def __init__(self) -> None:
        self._bandwidths = Bandwidths()
        self._book = TransferBook(self._bandwidths)
        self._free: list[int] = []
        self._num_links = 0
        self._reads: dict[RequestId, int] = {}  # how many flows a request has
        self._ended: list[tuple[RequestId, int]] = []  # flows that the book still has

    def join(self, host: int, bytes_per_s: float, local_bytes_per_s: float) -> int:
        """The link of a new endpoint. `host`: a digest; rates as registered, 0 = not measured."""
        if not self._free:
            self._free.append(self._num_links)
            self._num_links += 1
        link = self._free.pop()
        self._book.join(link, host & _HOST_MASK, bytes_per_s or None, local_bytes_per_s or None)
        return link

    def leave(self, link: int) -> None:
        """The endpoint is gone, and with it what was on its way."""
        self._book.leave(link)
        self._free.append(link)

    def begin(
        self, request_id: RequestId, reads: Sequence[tuple[int, float]], target: int, now: float
    ) -> None:
        """`reads`: link and bytes of each source."""
        if not reads:
            return
        self._clear(now)
        for number, (source, nbytes) in enumerate(reads):
            self._book.begin((request_id, number), source, target, nbytes, _tick(now))
        self._reads[request_id] = len(reads)

    def end(self, request_id: RequestId) -> None:
        """Its prefix is there, or nobody wants it any more. Unknown ones are ignored."""
        self._ended += ((request_id, number) for number in range(self._reads.pop(request_id, 0)))

    def seconds(self, source: int, targets: Ints, nbytes: Floats, now: float) -> Floats:
        """From one endpoint to each of others as if it were the only new flow; shapes [N]."""
        self._clear(now)
        if len(self._book):
            return self._book.seconds(source, targets, nbytes, _tick(now))
        return nbytes / self._bandwidths.alone(source, targets)

    def measured(self, source: int, target: int, nbytes: float, seconds: float) -> None:
        """An instance saw so many bytes pass in so much time, in which some were always under way."""
        self._bandwidths.observe(source, target, nbytes, seconds)

    def alone_between(self, source: int, target: int) -> float:
        """Bytes per second without other traffic."""
        return self._bandwidths.alone_between(source, target)

    def _clear(self, now: float) -> None:
        """Takes out what has ended since the last question: all at once, since each change of the book costs a pass."""
        for key in self._ended:
            # Not the book's `end`: when the first token comes says nothing of when the bytes came.
            self._book.abandon(key, _tick(now))
        self._ended.clear()

    def validate(self) -> None:
        self._book.validate()
        assert len(self._book) <= sum(self._reads.values()) + len(self._ended)
        assert sorted(set(self._free)) == sorted(self._free), "a link was given back twice"
        assert all(0 <= link < self._num_links for link in self._free)


def _tick(now: float) -> float:
    return math.floor(now / TICK_S) * TICK_S


def seconds_per_block(
    transfers: Transfers, source: int, targets: Ints, missing: Ints, block_bytes: int, now: float
) -> Floats:
    """Predicted for the missing blocks of each target together, each one's share of it; shape [N]."""
    blocks = np.maximum(missing, 1).astype(np.float64)
    return transfers.seconds(source, targets, blocks * block_bytes, now) / blocks
