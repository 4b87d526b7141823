"""The transfer engine of one process: owns its segments, windows, listeners and peers, and creates its transports."""

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost
from moonserve.protocol.process.machine import boot_id
from moonserve.transfer.batch import AnyTransfer, Batch, Job, Part, group_by_peer, packed, plan_single, plan_slices
from moonserve.transfer.config import FaultPlan, TransferOptions
from moonserve.transfer.memory.data_plane import address_of
from moonserve.transfer.memory.memfd import OwnedMemory
from moonserve.transfer.memory.scatter import LENGTH, REMOTE
from moonserve.transfer.memory.segments import Registrable, Segment, SegmentTable, writable
from moonserve.transfer.memory.write_windows import WindowTable
from moonserve.transfer.paths.connection_pool import ConnectionPool, PeerTable, UnfencedConnections
from moonserve.transfer.paths.failover import Peer, PeerContext
from moonserve.transfer.paths.hardware_discovery import read_topology
from moonserve.transfer.paths.path_selection import TransferPath
from moonserve.transfer.paths.peer_address import Address, Rail, parse_address
from moonserve.transfer.paths.traffic_stats import EngineUsage, TransferStats
from moonserve.transfer.shm.transport import ShmTransport
from moonserve.transfer.tcp.handshake import INSTANCE_BYTES
from moonserve.transfer.tcp.served_connections import ServedConnections
from moonserve.transfer.tcp.transport import TcpTransport
from moonserve.transfer.transport_interface import (
    Credentials,
    Dial,
    Listener,
    Op,
    RemoteSegment,
    ServedState,
    Session,
    Transport,
)

_INLINE_BYTES = 4 << 20
"""`run` executes transfers up to this size in the caller's thread, since waking another thread costs more. Larger ones
would delay other batches."""


class TransferEngine:
    """One-sided READ and WRITE between registered segments of authenticated processes.

    All methods are thread-safe. Peers use `address`, which is valid after `start` and only for this process.
    """

    def __init__(
        self,
        *,
        cluster_token: str,
        options: TransferOptions | None = None,
        name: str = "",
        faults: FaultPlan | None = None,
    ) -> None:
        """Creates an engine that does not listen yet. `name` is for the logs and metrics of peers. Raises ConfigError
        for an empty token or unknown transports."""
        if not cluster_token:
            raise ConfigError("the cluster token is empty")
        self.options = options or TransferOptions()
        self._name = name
        self._inline_bytes = {
            transport: min(_INLINE_BYTES, self.options.slice_bytes_over(transport)) for transport in _TRANSPORTS
        }
        self._transports = {each.name: each for each in make_transports(self.options.transports)}
        self._faults = faults or FaultPlan()
        credentials = Credentials(cluster_token.encode(), secrets.token_bytes(INSTANCE_BYTES))
        self._state = ServedState(credentials, SegmentTable(), WindowTable(), ServedConnections(), self.options)
        self._endpoints = ConnectionPool(self.options.max_endpoints)
        self._listeners: list[Listener] = []
        self._rails: list[Rail] = []
        self._peer_context: PeerContext | None = None
        self._peers: PeerTable[Peer] = PeerTable()
        self.address = ""
        self.stats = TransferStats()

    def __enter__(self) -> "TransferEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listens on every configured transport. Raises ConfigError if that fails or the engine was started before."""
        if self._listeners:
            raise ConfigError("the transfer engine has already been started")
        try:
            for transport in self._transports.values():
                self._listeners += transport.listen(self._state)
            self._rails = [listener.rail for listener in self._listeners]
            self._peer_context = PeerContext(
                connect=self._connect,
                topology=read_topology(self._rails),
                stats=self.stats,
                faults=self._faults,
                streams=self.options.streams,
                endpoints=self._endpoints,
                unfenced=UnfencedConnections(),
            )
        except ConfigError:
            self.close()
            raise
        rails: dict[str, list[Rail]] = {}
        for rail in self._rails:
            rails.setdefault(rail.transport, []).append(rail)
        instance = self._state.credentials.instance
        published = Address(instance, boot_id(), rails, self._name, self.options.tls is not None)
        self.address = str(published)

    def close(self) -> None:
        """Fails transfers in flight, ends all threads and closes all file descriptors. Idempotent."""
        self._peers.close()
        while self._listeners:
            self._listeners.pop().close()
        self._state.windows.close_all()
        for segment in self._state.segments.close():
            self._notify_removed(segment)

    def allocate(
        self,
        nbytes: int,
        location: str | None = None,
        *,
        readable: bool = False,
        name: str = "",
        elastic: bool = False,
    ) -> Segment:
        """Allocates zeroed memory that peers on this host can map. All its pages are resident; with `elastic`, only the
        pages that were written and not given back (`segment.memory.discard`). Raises ConfigError for elastic memory
        over rdma."""
        if elastic and "rdma" in self.options.transports:
            raise ConfigError(
                "rdma cannot use elastic memory, because its devices pin registered memory: remove rdma from "
                "--transports, or use fixed memory"
            )
        if nbytes <= 0:
            raise InvalidRequest(f"a segment of {nbytes} bytes", param="nbytes")
        memory = OwnedMemory(nbytes, name, elastic=elastic)
        if elastic and location is None:
            location = ""  # its pages do not exist yet
        add = self._state.segments.add
        return self._added(add(memory.view, location, readable=readable, name=name, memory=memory))

    def register(
        self,
        buffer: Registrable,
        location: str | None = None,
        *,
        readable: bool = False,
        name: str = "",
    ) -> Segment:
        """Registers the caller's memory: a torch tensor, numpy array, memoryview, mmap …, writable and contiguous.

        `location` ("cpu:<NUMA node>") selects which local rails are preferred; by default it is looked up. Raises
        InvalidRequest for unsuitable memory. Memory from `allocate` is faster between processes of one host.
        """
        add = self._state.segments.add
        return self._added(add(writable(buffer), location, readable=readable, name=name))

    def _added(self, segment: Segment) -> Segment:
        try:
            for transport in self._transports.values():
                transport.segment_added(segment)
        except MoonserveError:
            self.deregister(segment)
            raise
        return segment

    def deregister(self, segment: Segment) -> None:
        """Deregisters a segment. Raises InvalidRequest while a batch or an open window uses it."""
        self._state.segments.deregister(segment)
        self._notify_removed(segment)

    def _notify_removed(self, segment: Segment) -> None:
        for transport in self._transports.values():
            transport.segment_removed(segment)

    def open(self, peer: str, *, deadline_s: float = 10.0) -> list[RemoteSegment]:
        """Returns the peer's readable segments. Blocks; raises PeerLost."""
        infos = self._peer_at(peer).with_session(
            lambda session, ends_at: session.list_segments(ends_at), time.monotonic() + deadline_s
        )
        return [RemoteSegment(peer, info.segment_id, info) for info in infos]

    def map(self, remote: RemoteSegment, offset: int, length: int, *, deadline_s: float = 10.0) -> memoryview:
        """Returns a read-only view of memory of a peer on this host, mapped for as long as the view is held.

        Once the peer has deregistered the segment, the content is meaningless and the view does not tell. Blocks while
        connecting. Raises InvalidRequest if the memory cannot be mapped or the range is out of bounds, and PeerLost.
        """
        return self._peer_at(remote.address).with_session(
            lambda session, ends_at: session.view(remote.segment_id, offset, length, ends_at),
            time.monotonic() + deadline_s,
        )

    def open_window(self, segment: Segment, ranges: Sequence[tuple[int, int]]) -> int:
        """Lets peers WRITE these (offset, length) ranges of the segment. Returns the window's id, which is never
        reused."""
        self._state.segments.hold([segment])
        try:
            return self._state.windows.open(segment, ranges)
        except InvalidRequest:
            self._state.segments.release([segment])
            raise

    def close_window(self, window_id: int) -> None:
        """Closes a window. On return no write to it is in flight, and later writes are refused. Idempotent."""
        segment = self._state.windows.close(window_id)
        if segment is not None:
            self._state.segments.release([segment])

    def close_window_if_idle(self, window_id: int) -> bool:
        """Closes a window without waiting. Returns False if a write is in flight or the window is already closed."""
        segment = self._state.windows.close_if_idle(window_id)
        if segment is not None:
            self._state.segments.release([segment])
        return segment is not None

    def submit(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> Batch:
        """Starts transfers without blocking; the batch ends within `deadline_s` (plus a scheduling delay).

        Batches are unordered, and destinations of transfers must not overlap. Raises InvalidRequest if a local segment
        is not registered with this engine or the engine is closed.
        """
        return self._submit(tuple(transfers), time.monotonic() + deadline_s)

    def run(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> None:
        """Executes transfers and waits for them, in the caller's thread where that has the lower latency.

        Blocks for at most `deadline_s` (plus a scheduling delay). Raises what `Batch.wait` raises.
        """
        deadline_at = time.monotonic() + deadline_s
        if not self._run_inline(transfers, deadline_at):
            self._submit(tuple(transfers), deadline_at).wait()

    def _run_inline(self, transfers: Sequence[AnyTransfer], deadline_at: float) -> bool:
        """Carries transfers that fit into one small slice. Returns False if they must be submitted."""
        if not transfers or self._faults.any:
            return False
        first = transfers[0]
        peer = self._peers.by_address.get(first.remote.address)
        if peer is None:
            return False
        segments = self._state.segments
        lane, reads = peer.shm_lane if segments.is_registered(first.local) else None, first.op is Op.READ
        row = packed(first) if lane is not None and reads and len(transfers) == 1 else None
        if lane is not None and row and lane.copy_inline(0, first.remote.segment_id, first.local, row, 1):
            return True
        single = plan_single(transfers, self._inline_bytes[peer.transports[0]], deadline_at)
        if single is None:
            return False
        rows, count = address_of(single.rows), len(single.rows)
        window_id = 0 if reads else single.window_id or -1  # no window has this id
        if lane is not None and lane.copy_inline(window_id, single.segment_id, single.local, rows, count):
            return True
        segments.hold((single.local,))
        try:
            return peer.run_inline(single)
        finally:
            segments.release((single.local,))

    def _submit(self, transfers: tuple[AnyTransfer, ...], deadline_at: float) -> Batch:
        if self._peers.closed:
            raise InvalidRequest("the transfer engine is closed")
        segments = self._state.segments
        used = {transfer.local for transfer in transfers}
        parts = group_by_peer(transfers)
        segments.hold(used)
        batch = Batch(len(transfers), len(parts), lambda: segments.release(used))
        for address, indices in parts.items():
            self._put(address, transfers, indices, deadline_at, batch)
        return batch

    def _put(
        self,
        address: str,
        transfers: tuple[AnyTransfer, ...],
        indices: list[int],
        deadline_at: float,
        batch: Batch,
    ) -> None:
        try:
            peer = self._peer_at(address)
            if self._faults.take_drop():
                raise PeerLost("connection dropped by the fault plan")
        except MoonserveError as error:
            batch.settle_part(dict.fromkeys(indices, error))
            return
        slice_bytes = self.options.slice_bytes_over(peer.transports[0])
        planned = plan_slices(transfers, indices, slice_bytes=slice_bytes, deadline_at=deadline_at)
        if planned.parts and self._faults.any:
            self._corrupt(planned.parts[0], batch)
        job = Job(planned, batch, deadline_at)
        if planned.parts:
            peer.put(job, planned.parts)

    def _corrupt(self, part: Part, batch: Batch) -> None:
        """Makes the part send a copy of its bytes whose first byte is flipped, if the fault plan requests it."""
        if part.op is not Op.WRITE or not part.nbytes or not self._faults.take_corrupt_write():
            return
        source, lengths = part.local, part.rows[:, LENGTH]
        copy = bytearray().join(source.buffer[at : at + n] for _, at, n in part.rows.tolist())
        copy[0] ^= 0xFF
        part.local = segment = self.register(copy)
        part.rows = np.stack((part.rows[:, REMOTE], lengths.cumsum() - lengths, lengths), axis=1)
        batch.add_done_callback(lambda _: self.deregister(segment))

    def usage(self) -> EngineUsage:
        """Returns the number of segments, windows and connections that the engine holds now."""
        state = self._state
        segments = state.segments.infos()
        return EngineUsage(
            num_segments=len(segments),
            segment_bytes=sum(info.nbytes for info in segments),
            num_windows=len(state.windows),
            num_served=len(state.served),
            num_endpoints=len(self._endpoints),
        )

    def forget(self, address: str) -> None:
        """Drops a peer that is known to be dead. Its batches fail with PeerLost immediately. Does not block."""
        self._peers.forget(address)

    def _peer_at(self, text: str) -> Peer:
        """Returns the peer at an address. Raises InvalidRequest if the engine is not running, and the address's
        errors."""
        peer = self._peers.by_address.get(text)
        if peer is not None:
            peer.used_at = time.monotonic()  # postpones being dropped as unused
            return peer
        parsed, context = parse_address(text), self._peer_context
        near = [each for each in self._rails if self._transports[each.transport].reachable(parsed)]
        if context is None:
            raise InvalidRequest("the transfer engine has not been started")
        return self._peers.get_or_create(text, lambda: Peer(parsed, near, context))

    def _connect(
        self, peer: Address, path: TransferPath, deadline_at: float, while_waiting: Callable[[], None]
    ) -> Session:
        dial = Dial(
            address=peer,
            local=path.local,
            remote=path.remote,
            credentials=self._state.credentials,
            options=self.options,
            deadline_at=deadline_at,
            while_waiting=while_waiting,
        )
        return self._transports[path.transport].connect(dial)


def _rdma() -> Transport:
    from moonserve.transfer.rdma.transport import RdmaTransport  # loaded only if selected

    return RdmaTransport()


_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "rdma": _rdma,
    "tcp": TcpTransport,
}


def make_transports(names: Sequence[str]) -> tuple[Transport, ...]:
    """Creates the named transports, in order of preference. Raises ConfigError for no, unknown or repeated names."""
    unknown = [name for name in names if name not in _TRANSPORTS]
    if unknown or not names or len(set(names)) != len(names):
        raise ConfigError(f"transports {', '.join(names)!r}: choose from {', '.join(_TRANSPORTS)}")
    return tuple(_TRANSPORTS[name]() for name in names)
