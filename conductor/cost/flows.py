"""Flows on links: a row for each, with what it has left, moved on in time by equal shares.

Owns the dense table. Its rule: bytes left only ever shrink, and a flow without bytes left has no rate. Between two
changes every rate is constant, so that a step ends where the next flow has nothing left, and a flow ends once. The
arithmetic is `conductor.native.flows`. Pure; knows neither rates of pairs nor what a link is, and no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.native.base import Floats, Ints
from conductor.native.flows import ALONE, ALONE_S, BYTES, FLOW_COLUMNS, LEFT, TO, Links, flow_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedFlow:
    source: int
    destination: int
    nbytes: float
    alone_s: float  # that it would have taken without other traffic, by the shares it had


class FlowTable:
    """Adding and removing are O(1); a query and each flow's end one pass over the rows."""

    def __init__(self, capacity: int = 32) -> None:
        self._slots: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []  # by slot
        self._rows = np.zeros((capacity, FLOW_COLUMNS))
        self._kernel = flow_kernel()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots

    def left(self, key: Hashable) -> float:
        return float(self._rows[self._slots[key], LEFT])

    def at(self, row: int) -> Sequence[Hashable]:
        """Keys of the flows from and to an endpoint."""
        touching = np.flatnonzero((self._used()[:, : TO + 1] == row).any(axis=1))
        return [self._keys[slot] for slot in touching.tolist()]

    def add(
        self,
        key: Hashable,
        ends: tuple[int, int],
        links: tuple[int, int],
        nbytes: float,
        alone: float,
    ) -> None:
        """Links: the sender's and the receiver's; `alone`: bytes per second of the pair without other traffic."""
        slot = len(self)
        if slot == len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
        self._slots[key] = slot
        self._keys.append(key)
        self._rows[slot] = (*ends, *links, nbytes, nbytes, alone, 0.0)

    def remove(self, key: Hashable) -> EndedFlow | None:
        """None when it is not there."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        source, destination, _, _, nbytes, _, _, alone_s = self._rows[slot].tolist()
        self.discard(key)
        return EndedFlow(
            source=int(source), destination=int(destination), nbytes=nbytes, alone_s=alone_s
        )

    def discard(self, key: Hashable) -> None:
        """As `remove`, for who does not ask. The last flow takes its place."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        last_key = self._keys.pop()
        if slot < len(self._keys):
            self._keys[slot] = last_key
            self._slots[last_key] = slot
            self._rows[slot] = self._rows[len(self._keys)]

    # -- time and questions

    def advance(self, seconds: float, links: Links) -> None:
        """Lets `seconds` pass."""
        if self._keys:
            self._kernel.advance(self._used(), links, seconds)

    def seconds(
        self, links: Links, source: int, targets: Ints, nbytes: Floats, measured: Floats | None
    ) -> Floats:
        """`FlowKernel.seconds` beside these flows."""
        return self._kernel.seconds(self._used(), links, source, targets, nbytes, measured)

    def _used(self) -> Floats:
        return self._rows[: len(self._keys)]

    def validate(self) -> None:
        rows = self._used()
        assert self._slots == {key: slot for slot, key in enumerate(self._keys)}
        assert ((rows[:, LEFT] >= 0.0) & (rows[:, LEFT] <= rows[:, BYTES])).all()
        assert (rows[:, ALONE] > 0.0).all()
        assert (rows[:, ALONE_S] >= 0.0).all()
