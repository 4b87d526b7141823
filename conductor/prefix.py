"""One prompt's chain of blocks: who holds how much of it, from where to read it, and which conversation it is of. Pure.

Only store nodes can be read by others. A prefill instance's *own* prefix is the leading run in its device cache,
continued by the store node that is its home; beyond it lies what the best store node of the cluster holds.

A client's session id names the conversation. Without one, the chain does: nearly all prompts begin with blocks that
many conversations share (a system prompt), and the block behind the last of them is the conversation's own and stays in
every later turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.columns import DecodeTable, Flags, Floats, Ints, PrefillTable
from conductor.members import Instance, Members
from kvstore.directory import Leading
from protocol.ids import Role
from protocol.keys import BlockKey
from protocol.request import PrefixSource

# A prompt that many conversations begin with has more continuations than the edited turns of one of them.
LEAST_FORK = 4


class PrefixMap:
    """Instances that hold parts of the usable leading blocks of one prompt."""

    def __init__(self, leading: Leading, members: Members, excluded: Sequence[str]) -> None:
        """`leading`: of the blocks that may be re-used; the last token's block is never one of them."""
        self._leading = leading
        self._members = members
        self._stores = members.stores
        self._is_open = self._stores.is_open
        if excluded:
            self._is_open = self._is_open & ~np.isin(self._stores.ids, excluded)
        self._store_runs: Ints = leading.runs.take(self._stores.bit) * self._is_open
        self.best_blocks = 0
        self.best_store: int | None = None  # its row
        if len(self._stores):
            best = int(self._store_runs.argmax())
            self.best_blocks = int(self._store_runs[best])
            self.best_store = best if self.best_blocks else None

    def own_blocks(self, prefills: PrefillTable) -> tuple[Ints, Ints]:
        """Leading blocks of each row: in the device cache, and with those of the home store node that continue them."""
        device_blocks: Ints = self._leading.runs.take(prefills.bit)
        if not len(self._stores):
            return device_blocks, device_blocks
        home_blocks = self._store_runs.take(prefills.home) * prefills.has_home
        prefix_blocks = np.maximum(device_blocks, home_blocks)
        ahead = home_blocks < device_blocks  # a home may hold later blocks without the leading ones
        if np.count_nonzero(ahead):
            self._continue(prefills, ahead, prefix_blocks)
        return device_blocks, prefix_blocks

    def device_blocks(self, decodes: DecodeTable) -> Ints:
        """Leading blocks in the device cache of each row."""
        runs: Ints = self._leading.runs.take(decodes.bit)
        return runs

    def remote_s_per_block(
        self, readers: PrefillTable | DecodeTable, own_blocks: Ints, block_bytes: int, now: float
    ) -> Floats:
        """From the best store node, beside all that is on its way: each block's share of those that a reader lacks."""
        missing = self.best_blocks - own_blocks
        if self.best_store is None or not np.count_nonzero(missing > 0):
            return np.zeros(len(readers))
        source = int(self._stores.link[self.best_store])
        blocks = np.maximum(missing, 1).astype(np.float64)
        nbytes = blocks * block_bytes
        return self._members.transfers.seconds(source, readers.link, nbytes, now) / blocks

    def sources(self, reader: Instance, first: int, end: int) -> tuple[PrefixSource, ...]:
        """Store nodes for the blocks [first, end): on the reader's host first, then the least loaded holder."""
        stores = self._members.with_role(Role.STORE)
        runs: list[PrefixSource] = []
        position = first
        while position < end:
            row = self._nearest(reader, position)
            if row is None:
                break
            stop = min(self._leading.end_of_run(int(self._stores.bit[row]), position), end)
            runs.append(PrefixSource(store=stores[row].endpoint, first_block=position, num_blocks=stop - position))
            position = stop
        return tuple(runs)

    def _continue(self, prefills: PrefillTable, ahead: Flags, prefix_blocks: Ints) -> None:
        """Extends the prefixes of those rows over what follows in their home stores."""
        num_blocks = len(self._leading.slots)
        homes = prefills.home
        rows = np.flatnonzero(ahead & prefills.has_home & self._is_open[homes] & (prefix_blocks < num_blocks))
        bits, first = self._stores.bit[homes[rows]], prefix_blocks[rows]
        continued = self._leading.hold(bits, first)
        for row, bit in zip(rows[continued].tolist(), bits[continued].tolist(), strict=True):
            prefix_blocks[row] = self._leading.end_of_run(bit, int(prefix_blocks[row]))

    def _nearest(self, reader: Instance, position: int) -> int | None:
        """The row of the store to read a block from."""
        stores, leading = self._stores, self._leading
        readers, row = reader.seat.table, reader.seat.row
        if isinstance(readers, PrefillTable) and readers.has_home[row]:
            home = int(readers.home[row])
            if self._is_open[home] and leading.has(int(stores.bit[home]), position):
                return home
        holding = (leading.holders(stores.bit, position) & self._is_open).nonzero()[0]
        if not holding.size:
            return None
        beside = holding[stores.host[holding] == readers.host[row]]
        among = beside if beside.size else holding
        return int(among[stores.pending_reads[among].argmin()])


def first_distinguishing(keys: Sequence[BlockKey], children: Ints) -> bytes:
    """The block that follows the widest fork of a chain; its first block where nothing forks; empty without blocks.

    `children`: how many different blocks are known to follow each of the leading blocks of `keys`.
    """
    if not keys:
        return b""
    widest = int(np.argmax(children)) if len(children) else 0
    is_fork = widest < len(children) and children[widest] > LEAST_FORK
    return keys[min(widest + 1, len(keys) - 1)] if is_fork else keys[0]
