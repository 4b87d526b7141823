"""Prefix lookup for one prompt: its cached blocks per instance, the sources to read them from, its conversation. Pure.

Only blocks of store nodes can be read by other processes. A prefill instance's *own* prefix is the leading run in its
device cache, continued by its home store node. Later blocks are read from the best store node of the cluster.

A client's session id names the conversation. Without one, the chain of blocks identifies it: nearly all prompts begin
with blocks that many conversations share (a system prompt). The block after the last shared one belongs to the
conversation alone and is part of every later turn.
"""

from collections.abc import Sequence

import numpy as np

from moonserve.conductor.members import Instance, Members
from moonserve.conductor.prediction.instance_table import DecodeTable, Flags, Floats, Ints, PrefillTable
from moonserve.kvstore.directory import LeadingHolders
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import PrefixSource, Role

# A shared system prompt has more continuations than one conversation has edited turns.
MIN_FORK = 4


class PrefixMap:
    """Maps the reusable leading blocks of one prompt to the instances that hold them."""

    def __init__(self, leading: LeadingHolders, members: Members, excluded: Sequence[str]) -> None:
        """`leading`: lookup result for the reusable blocks; the block of the last token is never one of them."""
        self._leading = leading
        self._members = members
        self._stores = members.stores
        self._is_open = self._stores.is_open
        if excluded:
            self._is_open = self._is_open & ~np.isin(self._stores.ids, excluded)
        self._store_runs: Ints = leading.runs.take(self._stores.bit) * self._is_open
        self.best_blocks = 0
        self.best_store: int | None = None  # row of the store with the longest prefix
        if len(self._stores):
            best = int(self._store_runs.argmax())
            self.best_blocks = int(self._store_runs[best])
            self.best_store = best if self.best_blocks else None

    def own_blocks(self, prefills: PrefillTable) -> tuple[Ints, Ints]:
        """Returns the leading blocks of each row: in the device cache, and these continued by the home store node."""
        device_blocks: Ints = self._leading.runs.take(prefills.bit)
        if not len(self._stores):
            return device_blocks, device_blocks
        home_blocks = self._store_runs.take(prefills.home) * prefills.has_home
        prefix_blocks = np.maximum(device_blocks, home_blocks)
        ahead = home_blocks < device_blocks  # a home store may hold later blocks without the leading ones
        if np.count_nonzero(ahead):
            self._continue(prefills, ahead, prefix_blocks)
        return device_blocks, prefix_blocks

    def device_blocks(self, decodes: DecodeTable) -> Ints:
        """Returns the leading blocks in the device cache of each row."""
        runs: Ints = self._leading.runs.take(decodes.bit)
        return runs

    def remote_s_per_block(
        self, readers: PrefillTable | DecodeTable, own_blocks: Ints, block_bytes: int, now: float
    ) -> Floats:
        """Returns the seconds to read a reader's missing blocks from the best store node ÷ their number, next to all
        transfers in flight."""
        missing = self.best_blocks - own_blocks
        if self.best_store is None or not np.count_nonzero(missing > 0):
            return np.zeros(len(readers))
        source = int(self._stores.link[self.best_store])
        blocks = np.maximum(missing, 1).astype(np.float64)
        nbytes = blocks * block_bytes
        return self._members.transfers.seconds(source, readers.link, nbytes, now) / blocks

    def sources(self, reader: Instance, first: int, end: int) -> tuple[PrefixSource, ...]:
        """Returns the store nodes to read blocks [first, end) from. Preferred are the reader's home store, then stores
        on its host, then the holder with the fewest pending reads. Stops at the first block that no store holds."""
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
        """Extends the prefixes of the marked rows in place over the blocks that follow in their home stores."""
        num_blocks = len(self._leading.slots)
        homes = prefills.home
        rows = np.flatnonzero(ahead & prefills.has_home & self._is_open[homes] & (prefix_blocks < num_blocks))
        bits, first = self._stores.bit[homes[rows]], prefix_blocks[rows]
        continued = self._leading.hold(bits, first)
        for row, bit in zip(rows[continued].tolist(), bits[continued].tolist(), strict=True):
            prefix_blocks[row] = self._leading.end_of_run(bit, int(prefix_blocks[row]))

    def _nearest(self, reader: Instance, position: int) -> int | None:
        """Returns the row of the store to read a block from; None if no store holds it."""
        stores, leading = self._stores, self._leading
        readers, row = reader.row_ref.table, reader.row_ref.row
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


def conversation_block(keys: Sequence[BlockKey], children: Ints) -> bytes:
    """Returns the block after the widest fork of a chain, its first block if there is no fork, or b"" without blocks.

    `children`: the number of different blocks known to follow each of the leading blocks of `keys`.
    """
    if not keys:
        return b""
    widest = int(np.argmax(children)) if len(children) else 0
    is_fork = widest < len(children) and children[widest] > MIN_FORK
    return keys[min(widest + 1, len(keys) - 1)] if is_fork else keys[0]
