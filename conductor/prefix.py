"""What of one prompt's prefix is held where, and from where a chosen instance should read it. Pure.

Only store nodes can be read by others. A prefill instance's *own* prefix is the leading run in its device cache,
continued by the store node that is its home; beyond it lies what the best store node of the cluster holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.members import Instance, Members
from kvstore.directory import Directory
from protocol.ids import InstanceId, Role
from protocol.keys import BlockKey
from protocol.request import PrefixSource


class PrefixMap:
    """Who holds which part of the usable leading blocks of one prompt."""

    def __init__(
        self,
        directory: Directory,
        members: Members,
        keys: Sequence[BlockKey],
        excluded: frozenset[str],
    ) -> None:
        """`keys`: of the blocks that may be re-used; the last token's block is never one of them."""
        self._directory = directory
        self._keys = keys
        self._lengths = directory.prefix_lengths(keys)
        self._holders: dict[int, frozenset[InstanceId]] = {}  # by index in `keys`, as asked for
        self._stores = {
            store.instance_id: store
            for store in members.with_role(Role.STORE)
            if not store.draining and store.instance_id not in excluded
        }
        self.best_store: Instance | None = None
        self.best_blocks = 0
        for instance_id, store in self._stores.items():
            length = self._lengths.get(instance_id, 0)
            if length > self.best_blocks:
                self.best_store, self.best_blocks = store, length

    def own_blocks(self, instance: Instance) -> tuple[int, int]:
        """Leading blocks in the device cache, and with the home store node's blocks that continue them."""
        device_blocks = self._lengths.get(instance.instance_id, 0)
        home = instance.registration.home_store
        if home is None or home not in self._stores:
            return device_blocks, device_blocks
        return device_blocks, self._extent(home, device_blocks)

    def sources(self, reader: Instance, first: int, end: int) -> tuple[PrefixSource, ...]:
        """Store nodes for the blocks [first, end): on the reader's host first, then the least loaded holder."""
        runs: list[PrefixSource] = []
        position = first
        while position < end:
            holder = self._nearest(reader, position)
            if holder is None:
                break
            stop = min(self._extent(holder.instance_id, position), end)
            runs.append(
                PrefixSource(
                    store=holder.endpoint, first_block=position, num_blocks=stop - position
                )
            )
            position = stop
        return tuple(runs)

    def _nearest(self, reader: Instance, position: int) -> Instance | None:
        holders = self._holders_of(position)
        holding = [store for name, store in self._stores.items() if name in holders]
        if not holding:
            return None
        home, host = reader.registration.home_store, reader.endpoint.host
        return min(
            holding,
            key=lambda s: (s.instance_id != home, s.endpoint.host != host, s.pending_reads),
        )

    def _extent(self, instance_id: InstanceId, position: int) -> int:
        """End of the run of blocks from `position` on that one instance holds; `position` when it is empty."""
        end = self._lengths.get(instance_id, 0)
        if end > position:
            return end
        end = position
        while end < len(self._keys) and instance_id in self._holders_of(end):
            end += 1
        return end

    def _holders_of(self, index: int) -> frozenset[InstanceId]:
        holders = self._holders.get(index)
        if holders is None:
            holders = frozenset(self._directory.holders(self._keys[index]))
            self._holders[index] = holders
        return holders
