"""A node that copies objects from a real node while their keys are removed or written."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import pytest

from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.node.event_log import EventLog
from moonserve.kvstore.node.service import Context, StoreService
from moonserve.kvstore.published_index import IndexSegments
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.heartbeats import own_endpoint
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.wire import endpoint_to_wire
from moonserve.transfer import TransferEngine, TransferOptions
from tests.kvstore.node.nodes import TOKEN, Node, chain_of, connected, key, running_node
from tests.kvstore.state.states import Heard, make_state
from tests.patience import NEVER_S, PATIENCE_S

SIZE = 4096
NOBODY = cast(Context, None)  # these calls do not use the context

Hook = Callable[[], Awaitable[object]]


@pytest.fixture(scope="module")
def source() -> Iterator[Node]:
    with running_node("--dram", "1MiB") as node:
        yield node


@dataclass
class Target:
    """The target of a copy of one object: a node's service in this process."""

    service: StoreService
    state: StoreState
    source: Endpoint

    async def copy(self) -> kvstore_pb2.StoreCopyReply:
        request = kvstore_pb2.StoreCopyRequest(source=endpoint_to_wire(self.source), keys=[key(0)])
        return await self.service.Copy(request, NOBODY)


@asynccontextmanager
async def target_beside(source: Node) -> AsyncIterator[Target]:
    """Stores one object at the source and yields a target for its copy."""
    options = TransferOptions(transports=("shm",))
    async with connected(source.rpc_address) as (client, transfer, store):
        local = transfer.allocate(SIZE)
        await client.put(store, *chain_of(local, range(1), SIZE))
        with TransferEngine(cluster_token=TOKEN, name="target", options=options) as engine:
            state = make_state(2**20, Heard())
            service = StoreService(
                StoreConfig(instance_id="target", cluster_token=TOKEN),
                engine,
                engine.allocate(2**20),
                own_endpoint("target", rpc_address="", transfer_address=engine.address),
                state,
                IndexSegments(engine),
                EventLog(),
            )
            yield Target(service, state, store)
            await service.close()
            state.validate()


def after(monkeypatch: pytest.MonkeyPatch, target: Target, method: str, happens: Hook) -> None:
    """Runs `happens` after the source has answered a call and before the target gets the answer."""
    call = getattr(target.service._client, method)

    @wraps(call)
    async def called(*args: Any, **options: Any) -> Any:
        answer = await call(*args, **options)
        await happens()
        return answer

    monkeypatch.setattr(target.service._client, method, called)


async def test_key_removed_while_source_is_queried_is_not_copied(source: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key removed while the source is queried for removals is not copied: the source may hold the removed object."""
    async with target_beside(source) as target:
        remembering = target.service.removal_store
        after(monkeypatch, target, "call", lambda: remembering.remove([key(0)], 7))
        reply = await target.copy()
        assert (reply.copied, reply.missing) == (0, 1)
        assert target.state.catalog.present([key(0)]) == [False]


async def test_a_writer_that_waits_for_a_copy_of_its_key_is_answered_when_that_has_ended(
    source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with target_beside(source) as target:
        waiting: list[asyncio.Task[kvstore_pb2.StoreReserveReply]] = []

        async def another_writes() -> None:
            request = kvstore_pb2.StoreReserveRequest(reservation_id="other", ttl_s=10.0, wait_s=NEVER_S)
            request.wishes.add(key=key(0), length=SIZE)
            waiting.append(asyncio.create_task(target.service.Reserve(request, NOBODY)))
            await asyncio.sleep(0)  # it now waits

        after(monkeypatch, target, "read_leased", another_writes)
        assert (await target.copy()).copied == 1
        [slot] = (await asyncio.wait_for(waiting[0], PATIENCE_S)).slots
        assert slot.outcome == kvstore_pb2.StoreReserveReply.Slot.OUTCOME_PRESENT


async def test_a_copy_whose_caller_is_lost_at_its_end_is_written_to_the_disk_too(
    source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with target_beside(source) as target:
        queued: list[BlockKey] = []
        monkeypatch.setattr(target.service.mover, "enqueue_copies", queued.extend)
        copying = asyncio.create_task(target.copy())

        async def is_lost() -> None:
            copying.cancel()

        after(monkeypatch, target, "read_leased", is_lost)
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert (queued, target.state.catalog.present([key(0)])) == ([key(0)], [True])
