"""KV writes to decode workers: maps blocks to byte ranges in both pools, submits the writes, computes checksums.

`StepWriter.on_layer` is the hot path: it runs in the engine's thread after every layer. So everything that does not
depend on the layer is computed before the step, and blocks that are adjacent in both pools become one range. Writes
leave in batches that are worth their fixed cost: one per layer if layers are large, one for several layers if they are
small. Ranges are rows of numpy arrays: a prefix of a thousand blocks has fifty thousand of them.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from moonserve.prefill_worker.decisions.events import Landing, SlicePlan
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import KvLayout, RunningChecksum
from moonserve.protocol.request import BlockId, Endpoint
from moonserve.transfer import Batch, Op, RemoteSegment, ScatterTransfer, TransferEngine
from moonserve.transfer.config import TransferTimeout
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import data_plane
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE, Rows
from moonserve.worker.process import KvMemory

Submit = Callable[[ScatterTransfer], Batch]

# A batch costs the threads at both ends a fraction of a millisecond, in which they could copy some megabytes. With
# fewer bytes per batch a small model's prefill would wait for its own writes (LOG.md).
MIN_BATCH_BYTES = 2 << 20

Indexes = npt.NDArray[np.int64]


class KvRoute:
    """Maps token ranges of one sequence to its landing, for any piece."""

    __slots__ = ("_local", "_remote", "_runs", "_strides", "_window_id", "piece_bytes")

    def __init__(self, memory: KvMemory, landing: Landing, runs: Rows) -> None:
        """`runs` are the ranges of piece 0, as `block_runs` and `token_runs` return them."""
        self._local = memory.segment
        self._remote = RemoteSegment(landing.transfer_address, landing.segment_id)
        self._window_id = landing.window_id
        target_stride = landing.num_blocks * memory.layout.piece_bytes
        self._runs = runs + scatter.rows((memory.first_piece * target_stride, 0, 0))
        self._strides = scatter.rows((target_stride, memory.piece_stride, 0))
        self.piece_bytes = scatter.total(runs)
        """Bytes sent per piece."""

    def transfer(self, pieces: range) -> ScatterTransfer:
        """Returns the writes of the given pieces (2·layer for K, 2·layer + 1 for V), piece by piece."""
        shifts = np.array(pieces, np.int64)[:, None, None] * self._strides
        rows = (self._runs + shifts).reshape(-1, 3)
        return ScatterTransfer(Op.WRITE, self._local, self._remote, rows, self._window_id)


def block_runs(pairs: Sequence[tuple[BlockId, BlockId]], layout: KvLayout) -> Rows:
    """Returns the ranges of whole blocks, given as (own, target's). Ranges adjacent on both sides are merged."""
    own, target = np.array(pairs, np.int64).reshape(-1, 2).T
    return data_plane().joined(_blocks(own, target, layout))


def token_runs(table: Sequence[BlockId], target: Sequence[BlockId], start: int, end: int, layout: KvLayout) -> Rows:
    """Returns the ranges of a sequence's tokens [start, end), start < end. Ranges adjacent on both sides are merged."""
    size, token_bytes = layout.block_size, layout.token_bytes
    used = slice(start // size, layout.blocks_for(end))
    runs = _blocks(np.array(table[used]), np.array(target[used]), layout)
    skipped = start % size * token_bytes
    runs[-1, LENGTH] -= -end % size * token_bytes
    runs[0] += (skipped, skipped, -skipped)
    return data_plane().joined(runs)


def _blocks(own: Indexes, target: Indexes, layout: KvLayout) -> Rows:
    runs = np.empty((len(own), 3), np.int64)
    runs[:, REMOTE] = target * layout.piece_bytes
    runs[:, LOCAL] = own * layout.piece_bytes
    runs[:, LENGTH] = layout.piece_bytes
    return runs


class StepWriter:
    """Sends the KV that one step computes, layer by layer, and computes the checksums of the blocks it completes.

    A block's checksum covers its pieces K0 V0 K1 V1 …, the order in which layers finish. So it is updated after each
    layer, while the bytes are still in the processor's cache.
    """

    def __init__(self, memory: KvMemory, plans: Sequence[SlicePlan], submit: Submit) -> None:
        self._memory = memory
        self._submit = submit
        self._plans = plans
        self._sent = [_SentSlice(memory, plan) for plan in plans]
        self._sums = [_RunningBlockChecksum(memory, plan, index) for plan in plans for index in plan.complete]
        self._num_sums = [len(plan.complete) for plan in plans]

    def on_layer(self, layer: int) -> None:
        """Sends a layer's new K and V, which are in the pool, and updates checksums. Called in the engine's thread. A
        write that cannot start raises nothing here; it fails its slice."""
        pieces = range(2 * layer, 2 * layer + 2)
        for sent in self._sent:
            sent.add(pieces)
            if sent.num_pending_bytes >= MIN_BATCH_BYTES:
                sent.submit(self._submit)
        buffer, stride = self._memory.segment.buffer, self._memory.piece_stride
        for piece in pieces:
            for block in self._sums:
                start = block.start + piece * stride
                block.checksum.update(buffer[start : start + block.length])

    def checksums(self) -> list[tuple[tuple[int, int], ...]]:
        """Returns per plan (index in the block table, checksum) of each completed block. Valid after the last layer."""
        sums = iter(self._sums)
        return [
            tuple((entry.index, entry.checksum.intdigest()) for entry in islice(sums, count))
            for count in self._num_sums
        ]

    def finish(self) -> None:
        """Sends the remaining bytes after the step."""
        for sent in self._sent:
            sent.submit(self._submit)

    def send_to(self, landing: Landing, send_from: int) -> None:
        """Sends the only slice, which began without a landing, to this one, and the tokens from `send_from` on. Called
        before `finish` while the engine's thread may be in `on_layer`: that sends all layers so far or none."""
        [sent], [plan] = self._sent, self._plans
        sent.open_route(self._memory, plan, landing, send_from)

    def is_sent(self, position: int) -> bool:
        """Returns True if the plan at `position` has a landing."""
        return self._sent[position].is_sent

    async def wait_until_sent(self, position: int) -> None:
        """Waits until no write of the plan at `position` is in flight. Call after `finish`. Raises the first error."""
        sent = self._sent[position]
        await wait_for_all(sent.batches)
        if sent.error is not None:
            raise sent.error


class _SentSlice:
    """The writes of one slice."""

    __slots__ = ("_pending", "_route", "batches", "error")

    def __init__(self, memory: KvMemory, plan: SlicePlan) -> None:
        self.batches: list[Batch] = []
        self.error: MoonserveError | None = None
        self._pending = range(0)
        """Pieces that are in the pool and not sent yet."""
        self._route: KvRoute | None = None
        if plan.landing is not None:
            self.open_route(memory, plan, plan.landing, plan.send_from)

    def open_route(self, memory: KvMemory, plan: SlicePlan, landing: Landing, send_from: int) -> None:
        runs = token_runs(plan.slice.block_table, landing.block_ids, send_from, plan.slice.end, memory.layout)
        self._route = KvRoute(memory, landing, runs)

    @property
    def is_sent(self) -> bool:
        return self._route is not None

    @property
    def num_pending_bytes(self) -> int:
        return len(self._pending) * self._route.piece_bytes if self._route else 0

    def add(self, pieces: range) -> None:
        """Adds pieces that are now in the pool. They must follow the pieces added before."""
        if self.error is None:
            self._pending = range(self._pending.start if self._pending else pieces.start, pieces.stop)

    def submit(self, submit: Submit) -> None:
        """Sends the added pieces, if there is a landing. A write that cannot start raises nothing; it sets `error`."""
        route = self._route
        if route is None or not self._pending:
            return
        pending, self._pending = self._pending, range(0)
        try:
            self.batches.append(submit(route.transfer(pending)))
        except MoonserveError as error:
            self.error = error


class _RunningBlockChecksum:
    """The running checksum of one block's valid tokens."""

    __slots__ = ("checksum", "index", "length", "start")

    def __init__(self, memory: KvMemory, plan: SlicePlan, index: int) -> None:
        layout = memory.layout
        num_tokens = min(layout.block_size, plan.slice.end - index * layout.block_size)
        self.index = index
        self.start = plan.slice.block_table[index] * layout.piece_bytes
        self.length = num_tokens * layout.token_bytes
        self.checksum = RunningChecksum()


async def wait_for_all(batches: Sequence[Batch]) -> None:
    """Waits for all batches, even after one failed: their source must not change before. Raises the first error."""
    first_error: MoonserveError | None = None
    for batch in batches:
        try:
            await batch
        except MoonserveError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


# More than the instances of a cluster. Peers that were not met for longest are left to the transfer engine.
MAX_KNOWN_PEERS = 4096


class KvSender:
    """Submits writes with deadlines that grow with the bytes in flight to the same peer, since a write waits behind
    earlier ones. Forgets a peer's earlier incarnation when it meets a later one. Thread-safe: layers are sent from
    the engine's thread."""

    def __init__(self, transfer: TransferEngine, patience: TransferTimeout) -> None:
        self._transfer = transfer
        self._patience = patience
        self._lock = threading.Lock()
        self._bytes_in_flight: Counter[str] = Counter()
        """Bytes by transfer address."""
        self._known: OrderedDict[str, Endpoint] = OrderedDict()

    def submit(self, write: ScatterTransfer) -> Batch:
        """Submits a write without blocking. Raises what the transfer engine raises."""
        address, nbytes = write.remote.address, scatter.total(write.rows)
        with self._lock:
            self._bytes_in_flight[address] += nbytes
            deadline_s = self._patience.deadline_s(self._bytes_in_flight[address])
        try:
            batch = self._transfer.submit([write], deadline_s=deadline_s)
        except BaseException:  # nothing was submitted
            self._ended(address, nbytes)
            raise
        batch.add_done_callback(lambda _: self._ended(address, nbytes))
        return batch

    def note_peer(self, peer: Endpoint) -> None:
        """Records a peer. If it is a later incarnation at a new address, writes in flight to the earlier one fail."""
        with self._lock:
            known = self._known.get(peer.instance_id)
            if known is not None and known.epoch >= peer.epoch:
                return
            self._known[peer.instance_id] = peer
            self._known.move_to_end(peer.instance_id)
            if len(self._known) > MAX_KNOWN_PEERS:
                self._known.popitem(last=False)
        if known is not None and known.transfer_address != peer.transfer_address:
            self._transfer.forget(known.transfer_address)

    def _ended(self, address: str, nbytes: int) -> None:
        with self._lock:
            self._bytes_in_flight[address] -= nbytes
            if not self._bytes_in_flight[address]:
                del self._bytes_in_flight[address]
