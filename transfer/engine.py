"""The transfer engine of one process: its memory, its windows, its listeners, its peers."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost
from transfer import address, plan, registry
from transfer.address import Address, Rail, host_identity
from transfer.base import (
    Credentials,
    Dial,
    Hosted,
    Listener,
    Op,
    RemoteSegment,
    Session,
    Transfer,
    Transport,
)
from transfer.batch import Batch
from transfer.buffers import Registrable
from transfer.endpoints import Endpoints
from transfer.faults import FaultPlan
from transfer.job import Job
from transfer.known_peers import KnownPeers
from transfer.options import TransferOptions
from transfer.peer import Peer, Surroundings
from transfer.plan import AnyTransfer
from transfer.rails import sysfs
from transfer.rails.paths import Path
from transfer.segments import Segment, SegmentTable
from transfer.stats import EngineUsage, TransferStats
from transfer.unfenced import Unfenced
from transfer.windows import WindowTable
from transfer.wire.handshake import INSTANCE_BYTES
from transfer.wire.served import ServedConnections

AT_ONCE_BYTES = 256 << 10
"""`run` carries a single READ up to this size in the caller's thread: waking another costs more."""
_RUN_HERE_BYTES = 4 << 20
"""`run` carries batches up to this size in the caller's thread; larger ones would hold up others."""


class TransferEngine:
    """One-sided READ and WRITE between registered segments of authenticated processes.

    All methods are thread-safe. `address` is what peers need; it is valid after `start` and for this
    incarnation of the process only.
    """

    def __init__(
        self,
        *,
        cluster_token: str,
        options: TransferOptions | None = None,
        name: str = "",
        faults: FaultPlan | None = None,
    ) -> None:
        """`name` is for the logs and metrics of peers. Raises ConfigError for an empty token or unknown transports."""
        if not cluster_token:
            raise ConfigError("the cluster token is empty")
        self._options = options or TransferOptions()
        self._name = name
        self._transports = registry.make(self._options.transports)
        self._faults = faults or FaultPlan()
        credentials = Credentials(cluster_token.encode(), secrets.token_bytes(INSTANCE_BYTES))
        self._hosted = Hosted(
            credentials, SegmentTable(), WindowTable(), ServedConnections(), self._options
        )
        self._endpoints = Endpoints(self._options.max_endpoints)
        self._listeners: list[Listener] = []
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
        """Listens on every configured transport. Raises ConfigError when that is impossible, or done."""
        if self._listeners:
            raise ConfigError("the transfer engine has been started already")
        try:
            for transport in self._transports:
                self._listeners += transport.listen(self._hosted)
            self._rails = [listener.rail for listener in self._listeners]
            self._surroundings = self._make_surroundings()
        except ConfigError:
            self.close()
            raise
        rails: dict[str, list[Rail]] = {}
        for rail in self._rails:
            rails.setdefault(rail.transport, []).append(rail)
        instance = self._hosted.credentials.instance
        published = Address(instance, host_identity(), rails, self._name, self._options.tls)
        self.address = str(published)

    def _make_surroundings(self) -> Surroundings:
        return Surroundings(
            connect=self._connect,
            topology=sysfs.read_topology(self._rails, self._options.topology),
            stats=self.stats,
            faults=self._faults,
            streams=self._options.streams,
            endpoints=self._endpoints,
            unfenced=Unfenced(),
        )

    def close(self) -> None:
        """Fails what is under way, ends every thread, gives back every descriptor. Idempotent."""
        self._peers.close()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        self._hosted.windows.close_all()
        for segment in self._hosted.segments.close():
            self._tell_removed(segment)

    def allocate(
        self,
        nbytes: int,
        location: str = "cpu:0",
        *,
        readable: bool = False,
        name: str = "",
        elastic: bool = False,
    ) -> Segment:
        """New zeroed memory that peers on this host can map; all its pages are present, or with `elastic` those that
        were written and not given back (`segment.memory.discard`). Raises ConfigError for elastic memory beside rdma,
        whose devices keep pages where they were registered."""
        if elastic and "rdma" in self._options.transports:
            raise ConfigError(
                "elastic memory does not go with rdma, whose devices pin what is registered: take rdma out of "
                "--transports, or leave the memory fixed"
            )
        return self._added(
            self._hosted.segments.allocate(
                nbytes, location, readable=readable, name=name, elastic=elastic
            )
        )

    def register(
        self,
        buffer: Registrable,
        location: str = "cpu:0",
        *,
        readable: bool = False,
        name: str = "",
    ) -> Segment:
        """The caller's memory: a torch tensor, numpy array, memoryview, mmap …, writable and contiguous.

        Raises InvalidRequest for anything else. `allocate` is faster between processes of one host.
        """
        return self._added(
            self._hosted.segments.register(buffer, location, readable=readable, name=name)
        )

    def _added(self, segment: Segment) -> Segment:
        try:
            for transport in self._transports:
                transport.segment_added(segment)
        except MoonserveError:
            self.deregister(segment)
            raise
        return segment

    def deregister(self, segment: Segment) -> None:
        """Raises InvalidRequest while a batch or an open window uses it."""
        self._hosted.segments.deregister(segment)
        self._tell_removed(segment)

    def _tell_removed(self, segment: Segment) -> None:
        for transport in self._transports:
            transport.segment_removed(segment)

    def open(self, peer: str, *, deadline_s: float = 10.0) -> list[RemoteSegment]:
        """The segments that the engine with this address lets peers read. Blocks; raises PeerLost."""
        found: list[RemoteSegment] = []

        def ask(session: Session, ends_at: float) -> None:
            infos = session.list_segments(ends_at)
            found.extend(RemoteSegment(peer, info.segment_id, info) for info in infos)

        self._peer_at(peer).with_session(ask, time.monotonic() + deadline_s)
        return found

    @contextlib.contextmanager
    def view(
        self, remote: RemoteSegment, offset: int, length: int, *, deadline_s: float = 10.0
    ) -> Iterator[memoryview]:
        """`map` for a while; the view must not outlive the context."""
        with self.map(remote, offset, length, deadline_s=deadline_s) as view:
            yield view

    def map(
        self, remote: RemoteSegment, offset: int, length: int, *, deadline_s: float = 10.0
    ) -> memoryview:
        """A peer's memory on this host, read in place and mapped for as long as the view is held.

        What it shows means nothing once the peer has deregistered the segment, and nobody tells. Blocks while
        connecting. Raises InvalidRequest when it cannot be mapped or is out of bounds, PeerLost.
        """
        views: list[memoryview] = []

        def ask(session: Session, ends_at: float) -> None:
            views.append(session.view(remote.segment_id, offset, length, ends_at))

        self._peer_at(remote.address).with_session(ask, time.monotonic() + deadline_s)
        return views[0]

    def open_window(self, segment: Segment, ranges: Sequence[tuple[int, int]]) -> int:
        """Lets peers WRITE these (offset, length) ranges of the segment; ids are never reused."""
        self._hosted.segments.hold([segment])
        try:
            return self._hosted.windows.open(segment, ranges)
        except InvalidRequest:
            self._hosted.segments.release([segment])
            raise

    def close_window(self, window_id: int) -> None:
        """On return no write under it is under way and later ones are refused. Idempotent."""
        segment = self._hosted.windows.close(window_id)
        if segment is not None:
            self._hosted.segments.release([segment])

    def close_window_if_idle(self, window_id: int) -> bool:
        """As `close_window`, but never waits: False = a write is under way, or it was closed before."""
        segment = self._hosted.windows.close_if_idle(window_id)
        if segment is not None:
            self._hosted.segments.release([segment])
        return segment is not None

    def submit(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> Batch:
        """Returns at once; the batch ends within `deadline_s` (and a scheduling delay).

        Batches are unordered. Transfers must not overlap in their destinations. Raises InvalidRequest
        for a local segment that is not registered here, or a closed engine.
        """
        return self._submit(tuple(transfers), time.monotonic() + deadline_s, here=False)

    def run(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> None:
        """`submit` and `wait`, in the caller's thread where that is quicker: the way to low latency.

        Blocks for at most `deadline_s` (and a scheduling delay). Raises what `Batch.wait` raises.
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

    def _submit(
        self, transfers: tuple[AnyTransfer, ...], deadline_at: float, *, here: bool
    ) -> Batch:
        segments = self._hosted.segments
        used = {transfer.local for transfer in transfers}
        parts = plan.by_address(transfers)
        segments.hold(used)
        batch = Batch(len(transfers), len(parts), lambda: segments.release(used))
        if self._peers.closed:
            segments.release(used)
            raise InvalidRequest("the transfer engine is closed")
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
        slice_bytes = self._options.slice_bytes_over(peer.transports[0])
        planned = plan.plan(transfers, indices, slice_bytes=slice_bytes, deadline_at=deadline_at)
        self._damage(planned)
        job = Job(planned, batch, deadline_at)
        if not planned.parts:
            return
        quick = here and len(planned.parts) == 1 and job.nbytes <= _RUN_HERE_BYTES
        if not (quick and peer.run_here(job, planned)):
            peer.put(job, planned)

    def _damage(self, planned: plan.Planned) -> None:
        """What the fault plan orders."""
        for part in planned.parts[:1]:
            if part.op is Op.WRITE and self._faults.take_corrupt_write():
                part.damage = True
            elif part.op is Op.WRITE and self._faults.take_corrupt_slice():
                part.damage = part.damage_shows = True

    def usage(self) -> EngineUsage:
        """What is held now, for metrics."""
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
        """The peer is known to be dead: its batches fail with PeerLost now. Does not block."""
        self._peers.forget(address)

    def _peer_at(self, text: str) -> Peer:
        """Raises what is wrong with the address, InvalidRequest when the engine is not running."""
        peer = self._peers.met.get(text)
        if peer is not None:
            peer.used_at = time.monotonic()  # before it is dropped as unused
            return peer
        parsed, surroundings = address.parse(text), self._surroundings
        near = [rail for rail in self._rails if self._reachable(rail.transport, parsed)]
        if surroundings is None:
            raise InvalidRequest("the transfer engine has not been started")
        return self._peers.meet(text, lambda: Peer(parsed, near, surroundings))

    def _reachable(self, name: str, peer: Address) -> bool:
        return self._transport(name).reachable(peer)

    def _transport(self, name: str) -> Transport:
        return next(transport for transport in self._transports if transport.name == name)

    def _connect(
        self, peer: Address, path: Path, deadline_at: float, while_waiting: Callable[[], None]
    ) -> Session:
        dial = Dial(
            address=peer,
            local=path.local,
            remote=path.remote,
            credentials=self._hosted.credentials,
            options=self._options,
            deadline_at=deadline_at,
            while_waiting=while_waiting,
        )
        return self._transport(path.transport).connect(dial)
