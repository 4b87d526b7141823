"""Runs real store nodes for tests, each in its own process; their ready report gives their address."""

import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.faults.flipped_bytes import flip_bytes
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.objects import PutObject
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import FaultPlan, Segment, TransferEngine, TransferOptions
from tests.patience import PATIENCE_S, answered
from tests.processes import running, stop

TOKEN = "store-tests"


@dataclass(frozen=True, slots=True)
class Node:
    """A running node process."""

    process: subprocess.Popen[bytes]
    rpc_address: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        stop(self.process)

    def flip_byte(self, offset: int, segment_bytes: int) -> None:
        """Inverts a bit of the node's segment without the node's knowledge."""
        flip_bytes(self.process.pid, [offset], segment_bytes)


@contextlib.contextmanager
def running_node(*flags: str, instance_id: str = "store-0") -> Iterator[Node]:
    """Runs a node; yields it once it is ready. SIGTERM must end it with exit code 0, unless the test has ended it."""
    named = ("--instance-id", instance_id, "--log-level", "error")
    with running("store", *named, *flags, token=TOKEN) as (process, facts):
        yield Node(process, facts["rpc"])


@contextlib.asynccontextmanager
async def connected(
    rpc_address: str, transport: str = "shm", *, faults: FaultPlan | None = None, attaches: bool = True
) -> AsyncIterator[tuple[BlockStores, TransferEngine, Endpoint]]:
    """Connects a client to a node over one transport."""
    options = TransferOptions(transports=(transport,))
    with TransferEngine(cluster_token=TOKEN, options=options, faults=faults) as transfer:
        async with Channels(TOKEN) as channels:
            client = BlockStores(channels, transfer, attaches=attaches)
            try:
                yield client, transfer, await client.locate(rpc_address, timeout_s=PATIENCE_S)
            finally:
                await client.close()


async def stats_of(client: BlockStores, store: Endpoint) -> kvstore_pb2.StoreStatsReply:
    reply: kvstore_pb2.StoreStatsReply = await client.call(store, "Stats", kvstore_pb2.StoreStatsRequest())
    return reply


async def exists(client: BlockStores, store: Endpoint, keys: Sequence[BlockKey]) -> list[bool]:
    """Returns for each key whether it can be read now."""
    reply = await client.call(store, "Exists", kvstore_pb2.StoreExistsRequest(keys=keys))
    return list(reply.present)


async def remove(client: BlockStores, store: Endpoint, keys: Sequence[BlockKey]) -> None:
    await client.call(store, "Remove", kvstore_pb2.StoreRemoveRequest(keys=keys))


async def until_stats(
    client: BlockStores, store: Endpoint, holds: Callable[[kvstore_pb2.StoreStatsReply], bool]
) -> kvstore_pb2.StoreStatsReply:
    """Waits for statistics for which `holds` is true and returns them."""
    return await answered(lambda: stats_of(client, store), holds)


def key(number: int) -> BlockKey:
    return BlockKey((number + 1).to_bytes(16, "little"))  # an all-zero key is invalid


def chain_of(local: Segment, numbers: range, length: int, *, pieces: int = 1) -> tuple[list[PutObject], BufferSlots]:
    """Returns a chain of objects that lie back to back in `local`, each in `pieces` pieces in reverse order."""
    size = length // pieces
    offsets = [[index * length + n * size for n in reversed(range(pieces))] for index in range(len(numbers))]
    slots = BufferSlots.scattered(local, offsets, size)
    objects = [
        PutObject(key=key(number), parent=key(number - 1) if index else None, checksum=slots.checksum(index))
        for index, number in enumerate(numbers)
    ]
    return objects, slots
