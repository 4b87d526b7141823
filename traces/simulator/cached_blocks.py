"""A device's block pool with a prefix cache, as vLLM keeps it: finished prompts' blocks stay until space is needed.

Blocks of a computed prompt get its keys; whoever comes later and begins alike shares them. A block that no sequence
holds any more stays findable and counts as free; the least recently released goes first, and of a prompt the last
block before the first. Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq

from protocol.keys import BlockKey
from traces.simulator.blocks import CountedBlocks
from traces.simulator.sequence import Sequence


class CachedBlocks(CountedBlocks):
    """`free` counts blocks that only the cache keeps. A sequence's leading `num_shared` blocks have keys."""

    def __init__(self, total: int, block_size: int) -> None:
        super().__init__(total)
        self._block_size = block_size
        self._references: dict[BlockKey, int] = {}  # of those that sequences hold
        self._idle: OrderedDict[BlockKey, None] = OrderedDict()  # of the others, first to go first
        self._shared: dict[str, tuple[BlockKey, ...]] = {}  # by request: keyed blocks it holds

    def restore(self, sequence: Sequence, num_blocks: int, headroom: int) -> bool:
        usable = (sequence.tokens - 1) // self._block_size  # the last token is always computed
        found = self._leading(sequence.keys[:usable])
        # Idle ones among the found stop being free when they are held.
        taken = num_blocks - sum(key in self._references for key in found)
        if taken + headroom > self.free:
            return False
        for key in found:
            self._hold(key)
        self._shared[sequence.request_id] = found
        sequence.num_blocks = len(found)
        self.grow(sequence, num_blocks - len(found))
        sequence.missing = sequence.tokens - len(found) * self._block_size
        if sequence.begun_at is None:
            sequence.cached_tokens = len(found) * self._block_size
        return True

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        while len(self._idle) > self.free:
            self._idle.popitem(last=False)

    def computed(self, sequence: Sequence) -> None:
        """Its full prompt blocks can be found from now on; one that another sequence has by now is given back."""
        shared = self._shared.get(sequence.request_id, ())
        new = sequence.keys[len(shared) :]
        for key in new:
            if key in self._references or key in self._idle:
                self._hold(key)
                self.give_back(1)
            else:
                self._references[key] = 1
        self._shared[sequence.request_id] = (*shared, *new)

    def end(self, sequence: Sequence) -> None:
        shared = self._shared.pop(sequence.request_id, ())
        self.give_back(sequence.num_blocks - len(shared))
        for key in reversed(shared):
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                self._idle[key] = None
                self.give_back(1)
        sequence.num_blocks = 0

    def _leading(self, keys: Seq[BlockKey]) -> tuple[BlockKey, ...]:
        found: list[BlockKey] = []
        for key in keys:
            if key not in self._references and key not in self._idle:
                break
            found.append(key)
        return tuple(found)

    def _hold(self, key: BlockKey) -> None:
        if key in self._references:
            self._references[key] += 1
            return
        del self._idle[key]
        self._references[key] = 1
        super().take(1)

    def validate(self, sequences: Seq[Sequence]) -> None:
        """Raises AssertionError unless references are the holders' and nothing is counted twice."""
        held = [key for sequence in sequences for key in self._shared.get(sequence.request_id, ())]
        assert Counter(held) == self._references
        assert not self._references.keys() & self._idle.keys()
        assert len(self._idle) <= self.free
        own = sum(s.num_blocks - len(self._shared.get(s.request_id, ())) for s in sequences)
        assert own + len(self._references) == self.total - self.free, "blocks leak"
