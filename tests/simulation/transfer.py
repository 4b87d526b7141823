"""Simulated one-sided writes and reads between the memories of processes, with the transfer engine's guarantees.

A WRITE is stored by its target while the target is alive, runs and has the window open. A READ is served by the owner
of the memory. Both happen in two parts at different times, and may break off after the first. After a batch is done,
only bytes that a target had received when the initiator gave up may still be stored, while the window is open.
"""

from collections.abc import Callable, Sequence

import numpy as np

from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.transfer import Batch, Op, ScatterTransfer, Segment
from moonserve.transfer.memory.segments import SegmentTable
from moonserve.transfer.memory.write_windows import WindowTable
from tests.simulation.loop import Life
from tests.simulation.network import Network

PATIENT_POLL_S = 0.05


class SimulatedTransfer:
    """The part of `transfer.TransferEngine` that workers and stores use."""

    def __init__(self, network: Network, life: Life, engines: "dict[str, SimulatedTransfer]") -> None:
        self.address = f"kv:{life!r}"
        self.life = life
        self.windows: set[int] = set()  # open windows
        self.num_damaged = 0
        self.network = network
        self.loop = network.loop
        self.engines = engines
        self.under_way: dict[_Moving, None] = {}
        self._segments = SegmentTable()
        self._window_table = WindowTable()
        engines[self.address] = self

    def allocate(self, nbytes: int, *, readable: bool = True, name: str = "") -> Segment:
        return self._segments.add(memoryview(bytearray(nbytes)), readable=readable)

    def deregister(self, segment: Segment) -> None:
        self._segments.deregister(segment)

    # -- windows

    def open_window(self, segment: Segment, ranges: Sequence[tuple[int, int]]) -> int:
        assert self._segments.is_registered(segment)
        window_id = self._window_table.open(segment, ranges)
        self.windows.add(window_id)
        return window_id

    def close_window(self, window_id: int) -> None:
        self._window_table.close(window_id)
        self.windows.discard(window_id)

    def close_window_if_idle(self, window_id: int) -> bool:
        """Closes a window. One time in ten, returns False instead, as if a write were in progress."""
        if self.network.rng.random() < 0.1:
            return False
        was_open = window_id in self.windows
        self.close_window(window_id)
        return was_open

    # -- batches

    def submit(self, transfers: Sequence[ScatterTransfer], *, deadline_s: float) -> Batch:
        [transfer] = transfers  # workers submit one transfer at a time
        moving = _Moving(self, transfer, self.loop.time() + deadline_s)
        self.under_way[moving] = None
        moving.begin()
        return moving.batch

    def forget(self, address: str) -> None:
        for moving in [m for m in self.under_way if m.transfer.remote.address == address]:
            moving.settle(PeerLost("its peer has a successor"))

    # -- target side

    def store(self, write: ScatterTransfer, rows: "Rows", data: Sequence[bytes]) -> None:
        """Stores a write through its window. Raises StaleLease or InvalidRequest if the window does not allow it."""
        window = self._window_table.find(write.window_id or 0, write.remote.segment_id)
        window.require_inside(np.array(rows, np.int64).reshape(-1, 3))
        memory = window.segment.buffer
        with window:
            for (offset, _, length), content in zip(rows, data, strict=True):
                memory[offset : offset + length] = content
        self.damage(memory, rows, 0)

    def read(self, segment_id: int, offset: int, length: int) -> bytes:
        return bytes(self._segments.find(segment_id).buffer[offset : offset + length])

    def damage(self, memory: memoryview, rows: "Rows", side: int) -> None:
        """Flips a bit in one of the rows, with the probability `weather.corruption`."""
        if rows and self.network.rng.random() < self.network.weather.corruption:
            row = self.network.rng.choice(rows)
            memory[row[side] + self.network.rng.randrange(row[2])] ^= 1 << self.network.rng.randrange(8)
            self.num_damaged += 1


Rows = list[tuple[int, int, int]]
"""Rows of remote offset, local offset and length."""


class _Moving:
    """A transfer in flight."""

    def __init__(self, engine: SimulatedTransfer, transfer: ScatterTransfer, ends_at: float) -> None:
        self.transfer = transfer
        self.batch = Batch(1, 1, lambda: None)
        self._engine = engine
        self._peer = engine.engines[transfer.remote.address]
        self._ends_at = ends_at
        rows: Rows = [tuple(row) for row in transfer.rows.tolist()]  # type: ignore[misc]
        cut = engine.network.rng.randint(0, len(rows))
        self._parts = [rows[:cut], rows[cut:]]
        self._breaks_off = False  # it ends with an error, never successfully

    def begin(self) -> None:
        network = self._engine.network
        if network.loses():
            self._breaks_off = True
            later = network.latency()
            self._engine.loop.call_later(later, self.settle, PeerLost("connection reset"))
            if network.rng.random() < 0.5:
                self._parts.pop()
            else:
                return
        self._later()

    def _later(self) -> None:
        self._engine.loop.call_later(self._engine.network.latency(), self._step)

    def _step(self) -> None:
        """Carries the next part or ends. Runs in the initiator's life, since its threads stop with it."""
        if self.batch.done:
            return
        engine, peer, now = self._engine, self._peer, self._engine.loop.time()
        if not peer.life.is_alive:
            self.settle(PeerLost(f"{peer.address} is gone"))
        elif now >= self._ends_at:
            self._give_up()
        elif peer.life.is_stopped or engine.network.is_cut(engine.life, peer.life):
            engine.loop.call_later(PATIENT_POLL_S, self._step)
        elif self._parts:
            self._carry(self._parts.pop(0))
        elif not self._breaks_off:
            self.settle(None)

    def _carry(self, rows: Rows) -> None:
        try:
            if self.transfer.op is Op.WRITE:
                self._peer.store(self.transfer, rows, self._local(rows))
            else:
                self._fetch(rows)
        except MoonserveError as error:
            self.settle(error)
        else:
            self._later()

    def _local(self, rows: Rows) -> list[bytes]:
        memory = self.transfer.local.buffer
        return [bytes(memory[local : local + length]) for _, local, length in rows]

    def _fetch(self, rows: Rows) -> None:
        memory = self.transfer.local.buffer
        for remote, local, length in rows:
            segment_id = self.transfer.remote.segment_id
            memory[local : local + length] = self._peer.read(segment_id, remote, length)
        self._engine.damage(memory, rows, 1)

    def _give_up(self) -> None:
        """Ends the transfer with PeerLost. Bytes in the target's buffers may still be stored when it continues."""
        network = self._engine.network
        if self.transfer.op is Op.WRITE and self._parts and network.rng.random() < 0.5:
            rows = self._parts[0]
            late = self._late_store(rows, self._local(rows))
            network.send(self._engine.life, self._peer.life, late)
        self.settle(PeerLost("no answer in time"))

    def _late_store(self, rows: Rows, data: list[bytes]) -> Callable[[], None]:
        peer = self._peer

        def store() -> None:
            try:
                peer.store(self.transfer, rows, data)
            except MoonserveError:
                return  # the window is closed

        return lambda: peer.life.soon(store) if peer.life.is_alive else None

    def settle(self, error: MoonserveError | None) -> None:
        if not self.batch.done:
            del self._engine.under_way[self]
            self.batch.settle_part({} if error is None else {0: error})
