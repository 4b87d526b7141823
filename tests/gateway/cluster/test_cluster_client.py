"""The gateway's view of the cluster, its connections to workers, and its detection of workers that fall silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.cluster.cluster_client import ClusterClient
from moonserve.gateway.cluster.failure_detection import (
    LATE_AFTER_S,
    SUSPECT_AFTER_S,
    FailureDetector,
    LifeSign,
    WorkerStream,
    is_late,
)
from moonserve.protocol.errors import IntegrityError, MoonserveError, NoWorker, PeerLost
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import Endpoint, GatewayId, Role
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.patience import NEVER_S, PATIENCE_S


class RecordingChannels(Channels):
    """RPC channels that record which ones are closed."""

    def __init__(self) -> None:
        super().__init__("token")
        self.forgotten: asyncio.Queue[str] = asyncio.Queue()

    async def forget(self, address: str) -> None:
        await super().forget(address)
        self.forgotten.put_nowait(address)


Lost = asyncio.Queue[tuple[str, MoonserveError]]


class Scene(NamedTuple):
    cluster: ClusterClient
    channels: RecordingChannels
    lost: Lost
    server: RpcServer
    port: int


@contextlib.asynccontextmanager
async def following(
    conductor: "OneView | None" = None,
    worker: "Hasty | None" = None,
    on_batch: Callable[[str, worker_pb2.EventBatch], Awaitable[None]] | None = None,
) -> AsyncIterator[Scene]:
    """Yields a gateway's view of a cluster in which one server is conductor and worker, and a queue of its losses."""
    server, lost = RpcServer("token"), Lost()
    if conductor is not None:
        conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server.grpc)
    if worker is not None:
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)

    async with server.serving("127.0.0.1", 0, 0) as address, RecordingChannels() as channels:
        cluster = ClusterClient(
            channels,
            address,
            GatewayId("g"),
            on_batch=on_batch or AsyncMock(),
            on_lost=lambda instance_id, error: lost.put_nowait((instance_id, error)),
            on_view=lambda view: None,
            describe_self=conductor_pb2.GatewayView,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield Scene(cluster, channels, lost, server, int(address.rpartition(":")[2]))
        finally:
            await cluster.close()


def replaced(lost: Lost) -> list[str]:
    """Returns the losses due to a successor. Ignores failed connections, which are also reported, at any time."""
    losses = [lost.get_nowait() for _ in range(lost.qsize())]
    return [instance_id for instance_id, error in losses if "was replaced" in error.message]


def endpoint(name: str, epoch: int, port: int) -> Endpoint:
    return Endpoint(instance_id=name, epoch=epoch, rpc_address=f"127.0.0.1:{port}", transfer_address="", host="h")


async def test_replaced_incarnation_is_lost_at_once_and_its_channel_closes() -> None:
    async with following() as (cluster, channels, lost, *_):
        assert cluster.follow_events(endpoint("d0", 1, 2))
        assert cluster.follow_events(endpoint("d1", 1, 3))
        assert cluster.follow_events(endpoint("d0", 1, 2))
        assert replaced(lost) == []
        assert cluster.follow_events(endpoint("d0", 2, 4))
        assert replaced(lost) == ["d0"]
        assert not cluster.follow_events(endpoint("d0", 1, 2))  # events of the old epoch no longer count
        assert await channels.forgotten.get() == "127.0.0.1:2"
        cluster.follow_events(endpoint("d1", 2, 3))  # at the same address, so that the channel stays
        cluster.follow_events(endpoint("d0", 3, 5))
        assert await channels.forgotten.get() == "127.0.0.1:4"
        assert replaced(lost) == ["d1", "d0"]
        assert channels.forgotten.empty()


async def test_silent_stream_breaks_after_several_checks() -> None:
    """A silent stream is not broken at the first check, which may be late because this process itself was stopped."""
    worker = Hasty()
    worker.num_streams = 1
    async with following(worker=worker) as (cluster, _, lost, _, port):
        cluster.follow_events(endpoint("d0", 1, port))
        await lost.get()  # loss of the missed batches
        stream, much_later = cluster._streams["d0"], asyncio.get_running_loop().time() + 60.0
        stream.check_silence(much_later)
        stream.check_silence(much_later)
        stream.on_message(much_later)
        for _ in range(3):
            stream.check_silence(much_later)
        assert lost.empty()
        stream.check_silence(2 * much_later)
        assert "sent nothing" in str((await lost.get())[1])


async def test_listener_survives_a_batch_that_raises() -> None:
    """If a batch cannot be handled, its stream's requests are lost and later requests are heard on the next stream."""
    worker, handled = Hasty(), asyncio.Event()
    worker.batches = [worker_pb2.EventBatch(), worker_pb2.EventBatch()]

    async def fails_once(instance_id: str, batch: worker_pb2.EventBatch) -> None:
        if worker.num_streams == 1:
            raise ValueError("a bug")
        handled.set()

    async with following(worker=worker, on_batch=fails_once) as (cluster, _, lost, _, port):
        cluster.follow_events(endpoint("d0", 1, port))
        assert (await lost.get())[1].message == "d0 sent events that this gateway cannot process"
        await handled.wait()


class Hasty(worker_pb2_grpc.WorkerServicer):
    """Ends its first stream after one batch, then gives up on the gateway; later streams stay open."""

    num_streams = 0
    batches: Sequence[worker_pb2.EventBatch] = ()

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus()

    async def Events(self, request: worker_pb2.EventsRequest, context: Any) -> AsyncIterator[worker_pb2.EventBatch]:
        self.num_streams += 1
        standing = worker_pb2.Standing(times_given_up=self.num_streams - 1)
        yield worker_pb2.EventBatch(standing=standing)
        for batch in self.batches:
            yield batch
        if self.num_streams > 1:
            await asyncio.Event().wait()


async def test_new_request_waits_for_a_broken_stream_to_reopen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that starts while a stream is broken waits; otherwise it is lost together with the missed batches."""
    monkeypatch.setattr("moonserve.gateway.cluster.failure_detection._REOPEN_DELAY_S", NEVER_S)  # unless someone waits
    monkeypatch.setattr("moonserve.gateway.cluster.failure_detection._SETTLED_WITHIN_S", NEVER_S)
    async with following(worker=Hasty()) as (cluster, _, lost, server, port):
        worker = endpoint("d0", 1, port)
        await cluster.wait_for_streams([worker])  # the worker is not known yet
        cluster.follow_events(worker)
        assert isinstance((await lost.get())[1], PeerLost)
        broke_at = asyncio.get_running_loop().time()
        assert cluster.open_since() == {}
        await cluster.wait_for_streams([worker])
        assert isinstance(lost.get_nowait()[1], IntegrityError)  # loss of the missed batches
        assert cluster.open_since()["d0", 1] > broke_at
        await server.stop(0)
        await lost.get()
        await cluster.wait_for_streams([worker])  # returns also when the stream cannot be opened
        assert cluster.open_since() == {}


class OneView(conductor_pb2_grpc.ConductorServicer):
    is_restarted = False  # and knows no workers yet

    async def GetCluster(self, request: conductor_pb2.GetClusterRequest, context: Any) -> conductor_pb2.ClusterView:
        if self.is_restarted:
            return conductor_pb2.ClusterView()
        layout = common_pb2.KvLayout(block_size=32)
        return conductor_pb2.ClusterView(fingerprint="f", layout=layout, max_model_len=99, ready=True)


async def test_worker_that_leaves_with_a_broken_stream_is_reported_lost_again() -> None:
    """A worker that leaves with a broken stream is lost again, for requests placed there after the stream broke."""
    async with following(OneView()) as (cluster, _, lost, *_):
        cluster.follow_events(endpoint("d0", 1, 1))
        await cluster.refresh()
        losses = [await lost.get() for _ in range(lost.qsize())]
        assert losses[-1][1].message == "d0 left the cluster"


async def test_leaving_worker_keeps_the_channel_of_another_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonserve.gateway.cluster.failure_detection._REOPEN_DELAY_S", NEVER_S)
    async with following(OneView(), Hasty()) as (cluster, channels, lost, _, port):
        cluster.follow_events(endpoint("d0", 1, port))
        assert (await lost.get())[0] == "d0"  # its stream broke
        cluster.follow_events(endpoint("d1", 1, port))
        assert (await lost.get())[0] == "d1"  # its first batch reports what was missed
        await cluster.refresh()
        assert (await lost.get())[0] == "d0"  # it is not in the view
        assert channels.forgotten.empty()


async def test_without_a_conductor_liveness_expires_and_model_info_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a leader the gateway still accepts requests, which wait. In-flight requests continue when the conductor
    is back and knows no workers yet."""
    conductor = OneView()
    async with following(conductor) as (cluster, *_):
        with pytest.raises(NoWorker):
            cluster.model_info()
        await cluster.refresh()
        assert cluster.is_ready
        monkeypatch.setattr("moonserve.gateway.cluster.cluster_client._VIEW_LIFETIME_S", 0.0)
        assert not cluster.is_ready
        assert cluster.model_info().max_model_len == 99
        conductor.is_restarted = True
        await cluster.refresh()
        assert cluster.model_info().max_model_len == 99


@given(streams=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=10))
def test_standing_shows_whether_events_were_missed(streams: list[tuple[int, int, bool]]) -> None:
    """Each stream brings some batches, loses some, and may be followed by the worker giving up on this gateway."""
    worker = endpoint("d0", 1, 1)
    heard, given_up, taken, is_whole = WorkerStream(endpoint=worker), 0, 0, True
    for num_brought, num_lost, gives_up in [*streams, (0, 0, False)]:
        standing = worker_pb2.Standing(times_given_up=given_up, num_batches=taken)
        assert heard.on_standing(standing) == is_whole
        for _ in range(num_brought):
            heard.on_batch()
        taken += num_brought + num_lost
        is_whole = not num_lost
        if gives_up:
            given_up, taken, is_whole = given_up + 1, 0, False
    for standing in (worker_pb2.Standing(times_given_up=1), worker_pb2.Standing(num_batches=1)):
        assert not WorkerStream(endpoint=worker).on_standing(standing), "missed before the first stream"


SIGNS = st.lists(
    st.builds(
        LifeSign,
        instance_id=st.uuids().map(str),
        role=st.sampled_from([Role.PREFILL, Role.DECODE]),
        draining=st.booleans(),
        last_heard_s=st.floats(0, 10),
        last_message_s=st.floats(0, 10),
    ),
    max_size=6,
    unique_by=lambda sign: sign.instance_id,
)


def sign(name: str, heard_s: float, word_s: float = 9.0, *, draining: bool = False) -> LifeSign:
    return LifeSign(instance_id=name, role=Role.DECODE, draining=draining, last_heard_s=heard_s, last_message_s=word_s)


def find_silent(signs: list[LifeSign]) -> set[str]:
    """Returns the silent workers at the first check."""
    return FailureDetector().find_silent(signs, 100.0)


OTHER = sign("d1", 0.1)


@pytest.mark.parametrize(
    ("signs", "lost"),
    [
        ([sign("d0", SUSPECT_AFTER_S), OTHER], {"d0"}),
        ([sign("d0", 9.0, word_s=0.1), OTHER], set()),  # it still sends tokens
        # Without another worker of the role, the gateway waits.
        ([sign("d0", 9.0)], set()),
        ([sign("d0", 9.0), sign("d1", 9.0)], set()),
        ([sign("d0", 9.0), sign("d1", 0.1, draining=True)], set()),
    ],
)
def test_unheard_worker_is_lost_if_another_of_its_role_is_heard(signs: list[LifeSign], lost: set[str]) -> None:
    assert find_silent(signs) == lost


@given(SIGNS)
def test_one_worker_per_role_remains_and_lost_workers_were_late(signs: list[LifeSign]) -> None:
    lost = find_silent(signs)
    for each in signs:
        if each.instance_id in lost:
            left = [s for s in signs if s.role is each.role and s.instance_id not in lost]
            assert any(s.last_heard_s < LATE_AFTER_S and not s.draining for s in left)
    assert not lost or is_late(signs)


def test_recent_lateness_raises_the_threshold_for_a_while() -> None:
    detector = FailureDetector()
    late = [sign("d0", 1.5 * SUSPECT_AFTER_S), sign("d1", 0.1)]
    assert detector.find_silent(late, 0.0) == {"d0"}
    assert detector.find_silent([sign("d0", 0.1), sign("d1", 0.1)], 1.0) == set()
    assert detector.find_silent(late, 5.0) == set()
    for_ever = [sign("d0", 100.0), sign("d1", 0.1)]
    assert detector.find_silent(for_ever, 10.0) == {"d0"}
    assert detector.find_silent([sign("d1", 0.1)], 11.0) == set()
    assert detector.find_silent(late, 300.0) == {"d0"}


def test_punctual_workers_keep_the_threshold() -> None:
    detector = FailureDetector()
    for tenths in range(100):
        beats = [sign("d0", tenths % 10 / 10), sign("d1", (tenths + 3) % 10 / 10)]
        assert detector.find_silent(beats, tenths / 10) == set()
    assert detector.find_silent([sign("d0", SUSPECT_AFTER_S), OTHER], 12.0) == {"d0"}
