"""Moves the KV that sequences have computed here to the home store and back. Pure.

    preempted ─► StoreBlocks ─► BlocksStored ─► (waits for blocks) ─► LoadBlocks ─► BlocksLoaded ─► goes on
              └───── if more expensive than computing again ────────┘
    finished ──► StoreBlocks ─► BlocksStored      the answer: the next turn of its conversation begins with it

Owns references to the blocks that a put reads or a read writes while the move is in flight. The pool gives these blocks
to nothing else meanwhile, even if their sequence ends. Put blocks also become findable in the pool, so they need no
read until the pool evicts them.

Its rule: the store is used only where it is the cheaper way to the same KV. Blocks that the store refused, lost or was
too slow for are computed again. A sequence whose prompt has no full block is not kept: its key chain has no first key.

Does not know why a sequence was preempted, nor when it may be restored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonserve.decode_worker.decisions.events import BlocksLoaded, BlocksStored, LoadBlocks, OffloadBlock, StoreBlocks
from moonserve.decode_worker.decisions.limits_and_counters import Counters
from moonserve.decode_worker.decisions.sequence import Sequence as Running
from moonserve.decode_worker.decisions.sequence import SequencePhase
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.kv_blocks import NO_PARENT
from moonserve.protocol.request import BlockId, Endpoint
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.events import Action, StoreFound
from moonserve.worker.store_speed import StoreSpeeds

# Answers have the lowest priority: with this many moves in flight another one is not worth the blocks that it holds.
MAX_MOVES_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCosts:
    """Inputs of the comparison between computing KV again and moving it to the store and back."""

    prefill: PrefillProfile
    block_bytes: int
    host: str  # of this worker
    with_answers: bool = False  # also put the answers of finished sequences into the store


@dataclass(slots=True, eq=False)
class _Move:
    sequence: Running
    action: StoreBlocks | LoadBlocks
    blocks: tuple[BlockId, ...]  # blocks that the move reads or writes


class Offloading:
    """Decides which KV moves to and from the home store, and tracks the moves. `costs` is None without a store."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        counters: Counters,
        costs: OffloadCosts | None = None,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._counters = counters
        self._costs = costs
        self._home: Endpoint | None = None
        self._writes, self._reads = StoreSpeeds(), StoreSpeeds()
        self._moves: dict[int, _Move] = {}  # by move_id
        self._num_moves = 0

    @property
    def is_idle(self) -> bool:
        return not self._moves

    @property
    def num_blocks_in_puts(self) -> int:
        """Number of blocks in puts; they become free when their put ends."""
        return sum(len(each.blocks) for each in self._moves.values() if isinstance(each.action, StoreBlocks))

    def held_blocks(self) -> Iterator[tuple[BlockId, ...]]:
        """Yields the blocks of each move; this object holds a reference to each of them."""
        for each in self._moves.values():
            yield each.blocks

    def on_store_found(self, event: StoreFound) -> None:
        """Records the home store, which is reachable (again)."""
        self._home = event.store

    # -- to the store

    def offload(self, sequence: Running, now: float, out: list[Action]) -> None:
        """Puts the blocks of a sequence that is being preempted, without those that the store has, if that is cheaper
        than computing them again. No step may use the sequence. The caller can release its blocks at once."""
        full = sequence.slice.start // self._block_size
        if self._home is None or not sequence.block_keys or full <= sequence.num_stored:
            return
        if not sequence.request.cache_hints.store:
            return
        if not self._is_cheaper(sequence, full, full - sequence.num_stored, now):
            return
        sequence.extend_keys(full, self._block_size)
        items = tuple(self._item(sequence, index) for index in range(sequence.num_stored, full))
        self._put(sequence, items, self._home, out)
        self._counters.preemptions_kept += 1

    def offload_answer(self, sequence: Running, out: list[Action]) -> None:
        """Puts the full blocks of a finished sequence that lie behind the prompt's. A later prompt that contains this
        answer finds them as if they had been prefilled. The caller can release the blocks at once."""
        full = sequence.slice.start // self._block_size
        first = max(len(sequence.request.block_keys), sequence.num_stored)
        if self._home is None or self._costs is None or not self._costs.with_answers:
            return
        if not sequence.block_keys or full <= first or not sequence.request.cache_hints.store:
            return
        if len(self._moves) >= MAX_MOVES_IN_FLIGHT:
            self._counters.answers_dropped += 1
            return
        sequence.extend_keys(full, self._block_size)
        items = tuple(self._item(sequence, index) for index in range(first, full))
        self._put(sequence, items, self._home, out)
        self._counters.answers_kept += 1

    def _put(self, sequence: Running, items: tuple[OffloadBlock, ...], store: Endpoint, out: list[Action]) -> None:
        blocks = tuple(item.block for item in items)
        self._pool.retain(blocks)
        number = self._begin()
        put = StoreBlocks(move_id=number, store=store, blocks=items, hints=sequence.request.cache_hints)
        self._moves[number] = _Move(sequence, put, blocks)
        sequence.move_id = number
        out.append(put)

    def _item(self, sequence: Running, index: int) -> OffloadBlock:
        block, key = sequence.block_table[index], sequence.block_keys[index]
        known = self._pool.checksum_of(block) if self._pool.key_of(block) == key else None
        parent = sequence.block_keys[index - 1] if index else None
        return OffloadBlock(block=block, key=key, parent=parent, checksum=known)

    def _is_cheaper(self, sequence: Running, num_read: int, num_put: int, now: float) -> bool:
        """Returns True if putting `num_put` blocks and reading `num_read` takes less time than computing the latter."""
        if self._home is None or self._costs is None or not num_read:
            return False
        host, block_bytes = self._costs.host, self._costs.block_bytes
        store_s = self._reads.of(self._home, host, now).seconds(num_read * block_bytes)
        if num_put:
            store_s += self._writes.of(self._home, host, now).seconds(num_put * block_bytes)
        num_tokens = len(sequence.token_ids)
        profile = self._costs.prefill
        saved_s = profile.seconds(num_tokens, 0) - profile.seconds(num_tokens, num_read * self._block_size)
        return store_s < saved_s

    def on_stored(self, event: BlocksStored, now: float) -> None:
        """Handles the end of a put, successful or not: publishes the blocks in the pool and releases them."""
        move = self._moves.pop(event.move_id)
        assert isinstance(move.action, StoreBlocks), "what was read is told otherwise"
        items = move.action.blocks
        corrupt = set(event.corrupt)
        for item, checksum in zip(items, event.checksums, strict=False):
            if item.key in corrupt:
                self._pool.uncache(item.block)
            elif self._pool.key_of(item.block) is None:
                self._pool.publish(item.block, item.key, item.parent or NO_PARENT, checksum)
        if event.is_complete:
            move.sequence.num_stored += len(items)
            self._counters.kept_blocks += len(items)
        else:
            self._counters.keep_failures += 1
        if event.error is not None:
            self._home = None  # until the next StoreFound
        self._update_speed(self._writes, move.action.store, event.num_bytes, event.seconds, now)
        self._end(move)

    # -- from the store

    def fetch(self, sequence: Running, num_found: int, now: float, out: list[Action]) -> None:
        """Reads KV into the blocks of a restored sequence, if that is cheaper than computing it. The first `num_found`
        of its blocks already hold their KV."""
        usable = min(sequence.num_stored, (len(sequence.token_ids) - 1) // self._block_size)
        if usable <= num_found or not self._is_cheaper(sequence, usable - num_found, 0, now):
            return
        assert self._home is not None, "nothing is cheap without a store"
        blocks = tuple(sequence.block_table[num_found:usable])
        self._pool.retain(blocks)
        number = self._begin()
        keys = tuple(sequence.block_keys[num_found:usable])
        load = LoadBlocks(move_id=number, store=self._home, keys=keys, blocks=blocks)
        self._moves[number] = _Move(sequence, load, blocks)
        sequence.move_id = number
        out.append(load)

    def on_loaded(self, event: BlocksLoaded, now: float) -> None:
        """Handles the end of a read. The leading blocks that have a checksum in the event now hold their KV."""
        move = self._moves.pop(event.move_id)
        sequence, action = move.sequence, move.action
        assert isinstance(action, LoadBlocks), "what was put is told otherwise"
        if sequence.phase is not SequencePhase.ENDED:
            first = sequence.slice.start // self._block_size
            for index, checksum in enumerate(event.checksums, first):
                parent = sequence.block_keys[index - 1] if index else NO_PARENT
                block = sequence.block_table[index]
                self._pool.publish(block, sequence.block_keys[index], parent, checksum)
            sequence.num_stored = min(sequence.num_stored, first + len(event.checksums))
            sequence.rewind((first + len(event.checksums)) * self._block_size)
        self._counters.fetched_blocks += len(event.checksums)
        self._update_speed(self._reads, action.store, event.num_bytes, event.seconds, now)
        self._end(move)

    def _begin(self) -> int:
        self._num_moves += 1
        return self._num_moves

    def _end(self, move: _Move) -> None:
        self._pool.release(move.blocks)
        move.sequence.move_id = None

    def _update_speed(self, speeds: StoreSpeeds, store: Endpoint, num_bytes: int, seconds: float, now: float) -> None:
        if num_bytes and self._costs is not None:
            known = speeds.of(store, self._costs.host, now)
            speeds.measured(store, known.after(num_bytes, seconds), now)

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError if a block of a move is unreferenced, is written by two reads, or is findable while a
        read writes it."""
        for number, move in self._moves.items():
            assert move.blocks, f"move {number} moves nothing"
            assert all(self._pool.references_of(block) for block in move.blocks)
            assert move.sequence.move_id == number, "a sequence lost its move"
        loading: Sequence[BlockId] = [
            block for move in self._moves.values() if isinstance(move.action, LoadBlocks) for block in move.blocks
        ]
        assert len(loading) == len(set(loading)), "two reads fill one block"
        assert all(self._pool.key_of(block) is None for block in loading), "a filled block is found"
