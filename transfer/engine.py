"""Transfer engine of one process: owns its segments, windows, listeners and peers."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost
from protocol.machine import boot_id
from transfer import address, plan, registry
from transfer.address import Address, Rail
from transfer.base import (
    Credentials,
    Dial,
    Hosted,
    Op,
    RemoteSegment,
    Transfer,
)
from transfer.batch import Batch, Job
from transfer.config import FaultPlan, TransferOptions
from transfer.paths.chooser import Path
from transfer.paths.discovery import read_topology
from transfer.paths.endpoints import Endpoints, Unfenced
from transfer.peer import Peer, Surroundings
from transfer.plan import AnyTransfer
from transfer.scatter import LENGTH, REMOTE
from transfer.segments import Registrable, Segment, SegmentTable
from transfer.stats import EngineUsage, TransferStats
from transfer.tcp.acceptor import Acceptor, ServedConnections
from transfer.tcp.handshake import INSTANCE_BYTES
from transfer.tcp.session import StreamSession
from transfer.windows import WindowTable

AT_ONCE_BYTES = 256 << 10
"""`run` executes a single READ up to this size in the caller's thread, since waking another thread costs more."""
_RUN_HERE_BYTES = 4 << 20
"""`run` executes batches up to this size in the caller's thread. Larger ones would delay other batches."""
_UNUSED_S = 300.0  # after which an unused peer is dropped


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
        self._transports = {each.name: each for each in registry.make(self.options.transports)}
        self._faults = faults or FaultPlan()
        credentials = Credentials(cluster_token.encode(), secrets.token_bytes(INSTANCE_BYTES))
        self._hosted = Hosted(credentials, SegmentTable(), WindowTable(), ServedConnections(), self.options)
        self._endpoints = Endpoints(self.options.max_endpoints)
        self._listeners: list[Acceptor] = []
        self._rails: list[Rail] = []
        self._surroundings: Surroundings | None = None
        self._peers = KnownPeers()
        self.address = ""
        self.stats = TransferStats()

    def __enter__(self) -> TransferEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listens on every configured transport. Raises ConfigError if that fails or the engine was started before."""
        if self._listeners:
            raise ConfigError("the transfer engine has been started already")
        try:
            for transport in self._transports.values():
                self._listeners += transport.listen(self._hosted)
            self._rails = [listener.rail for listener in self._listeners]
            self._surroundings = Surroundings(
                connect=self._connect,
                topology=read_topology(self._rails),
                stats=self.stats,
                faults=self._faults,
                streams=self.options.streams,
                endpoints=self._endpoints,
                unfenced=Unfenced(),
            )
        except ConfigError:
            self.close()
            raise
        rails: dict[str, list[Rail]] = {}
        for rail in self._rails:
            rails.setdefault(rail.transport, []).append(rail)
        instance = self._hosted.credentials.instance
        published = Address(instance, boot_id(), rails, self._name, self.options.tls is not None)
        self.address = str(published)

    def close(self) -> None:
        """Fails transfers in flight, ends all threads and closes all file descriptors. Idempotent."""
        self._peers.close()
        while self._listeners:
            self._listeners.pop().close()
        self._hosted.windows.close_all()
        for segment in self._hosted.segments.close():
            self._tell_removed(segment)

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
                "elastic memory does not go with rdma, whose devices pin what is registered: take rdma out of "
                "--transports, or leave the memory fixed"
            )
        allocate = self._hosted.segments.allocate
        return self._added(allocate(nbytes, location, readable=readable, name=name, elastic=elastic))

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
        register = self._hosted.segments.register
        return self._added(register(buffer, location, readable=readable, name=name))

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
        self._hosted.segments.deregister(segment)
        self._tell_removed(segment)

    def _tell_removed(self, segment: Segment) -> None:
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
        self._hosted.segments.hold([segment])
        try:
            return self._hosted.windows.open(segment, ranges)
        except InvalidRequest:
            self._hosted.segments.release([segment])
            raise

    def close_window(self, window_id: int) -> None:
        """Closes a window. On return no write to it is in flight, and later writes are refused. Idempotent."""
        segment = self._hosted.windows.close(window_id)
        if segment is not None:
            self._hosted.segments.release([segment])

    def close_window_if_idle(self, window_id: int) -> bool:
        """Closes a window without waiting. Returns False if a write is in flight or the window is already closed."""
        segment = self._hosted.windows.close_if_idle(window_id)
        if segment is not None:
            self._hosted.segments.release([segment])
        return segment is not None

    def submit(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> Batch:
        """Starts transfers without blocking; the batch ends within `deadline_s` (plus a scheduling delay).

        Batches are unordered, and destinations of transfers must not overlap. Raises InvalidRequest if a local segment
        is not registered with this engine or the engine is closed.
        """
        return self._submit(tuple(transfers), time.monotonic() + deadline_s, here=False)

    def run(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> None:
        """Executes transfers and waits for them, in the caller's thread where that has the lower latency.

        Blocks for at most `deadline_s` (plus a scheduling delay). Raises what `Batch.wait` raises.
        """
        deadline_at = time.monotonic() + deadline_s
        if len(transfers) == 1 and self._read_here(transfers[0], deadline_at):
            return
        self._submit(tuple(transfers), deadline_at, here=True).wait()

    def _read_here(self, transfer: AnyTransfer, deadline_at: float) -> bool:
        if (
            type(transfer) is not Transfer
            or transfer.op is not Op.READ
            or not 0 < transfer.length <= AT_ONCE_BYTES
            or self._faults.any
        ):
            return False
        peer = self._peers.met.get(transfer.remote.address)
        if peer is None:
            return False
        segments = self._hosted.segments
        segments.hold((transfer.local,))
        try:
            return peer.read_here(transfer, deadline_at)
        finally:
            segments.release((transfer.local,))

    def _submit(self, transfers: tuple[AnyTransfer, ...], deadline_at: float, *, here: bool) -> Batch:
        if self._peers.closed:
            raise InvalidRequest("the transfer engine is closed")
        segments = self._hosted.segments
        used = {transfer.local for transfer in transfers}
        parts = plan.by_address(transfers)
        segments.hold(used)
        batch = Batch(len(transfers), len(parts), lambda: segments.release(used))
        for peer_address, indices in parts.items():
            self._put(peer_address, transfers, indices, deadline_at, batch, here=here)
        return batch

    def _put(
        self,
        peer_address: str,
        transfers: tuple[AnyTransfer, ...],
        indices: list[int],
        deadline_at: float,
        batch: Batch,
        *,
        here: bool,
    ) -> None:
        try:
            peer = self._peer_at(peer_address)
            if self._faults.take_drop():
                raise PeerLost("connection dropped by the fault plan")
        except MoonserveError as error:
            batch.settle_part(dict.fromkeys(indices, error))
            return
        slice_bytes = self.options.slice_bytes_over(peer.transports[0])
        planned = plan.plan(transfers, indices, slice_bytes=slice_bytes, deadline_at=deadline_at)
        if planned.parts and self._faults.any:
            self._corrupt(planned.parts[0], batch)
        job = Job(planned, batch, deadline_at)
        if not planned.parts:
            return
        quick = here and len(planned.parts) == 1 and job.nbytes <= _RUN_HERE_BYTES
        if not (quick and peer.run_here(job, planned)):
            peer.put(job, planned)

    def _corrupt(self, part: plan.Part, batch: Batch) -> None:
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
        hosted = self._hosted
        segments = hosted.segments.infos()
        return EngineUsage(
            num_segments=len(segments),
            segment_bytes=sum(info.nbytes for info in segments),
            num_windows=len(hosted.windows),
            num_served=len(hosted.served),
            num_endpoints=len(self._endpoints),
        )

    def forget(self, address: str) -> None:
        """Drops a peer that is known to be dead. Its batches fail with PeerLost immediately. Does not block."""
        self._peers.forget(address)

    def _peer_at(self, text: str) -> Peer:
        """Returns the peer at an address. Raises InvalidRequest if the engine is not running, and the address's
        errors."""
        peer = self._peers.met.get(text)
        if peer is not None:
            peer.used_at = time.monotonic()  # postpones being dropped as unused
            return peer
        parsed, surroundings = address.parse(text), self._surroundings
        near = [each for each in self._rails if self._transports[each.transport].reachable(parsed)]
        if surroundings is None:
            raise InvalidRequest("the transfer engine has not been started")
        return self._peers.meet(text, lambda: Peer(parsed, near, surroundings))

    def _connect(
        self, peer: Address, path: Path, deadline_at: float, while_waiting: Callable[[], None]
    ) -> StreamSession:
        dial = Dial(
            address=peer,
            local=path.local,
            remote=path.remote,
            credentials=self._hosted.credentials,
            options=self.options,
            deadline_at=deadline_at,
            while_waiting=while_waiting,
        )
        return self._transports[path.transport].connect(dial)


class KnownPeers:
    """Peers of one engine by address, created at first use and ended when forgotten or long unused.

    An ended peer is kept until its threads have stopped, so that `close` leaves no thread behind. Thread-safe; `met`
    may be read without the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.met: dict[str, Peer] = {}
        self.leaving: list[Peer] = []
        """Peers that were requested to end and whose threads may still run."""
        self.closed = False

    def meet(self, address: str, make: Callable[[], Peer]) -> Peer:
        """Returns the peer, made on first use. Raises InvalidRequest once closed, and any error of `make`."""
        with self._lock:
            if self.closed:
                raise InvalidRequest("the transfer engine is closed")
            peer = self.met.get(address)
            if peer is None:
                self._drop_unused()
                peer = self.met[address] = make()
        return peer

    def forget(self, address: str) -> None:
        """Ends one peer; its batches fail immediately. Does not block."""
        with self._lock:
            self.leaving = [peer for peer in self.leaving if not peer.stopped]
            if (peer := self.met.pop(address, None)) is not None:
                self.leaving.append(peer)
                peer.forget()

    def close(self) -> None:
        """Refuses new peers and ends all known ones. On return no thread of a peer runs. Idempotent."""
        with self._lock:
            self.closed, peers = True, [*self.met.values(), *self.leaving]
            self.met, self.leaving = {}, []
        for peer in peers:
            peer.forget()
        for peer in peers:
            peer.join()

    def _drop_unused(self) -> None:
        """Drops unused peers, since each vanished peer leaves an entry behind. The lock is held."""
        before = time.monotonic() - _UNUSED_S
        for known, peer in list(self.met.items()):
            if peer.idle and peer.used_at < before:
                del self.met[known]
                peer.forget()  # a caller that still holds this peer must not start transfers on it
