"""Runs a directory process and queries it."""

import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence

from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from moonserve.protocol.pb import directory_pb2, directory_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels
from tests.kvstore.node.nodes import TOKEN
from tests.patience import PATIENCE_S, answered
from tests.processes import running


@contextlib.contextmanager
def running_directory(*flags: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a directory process. SIGTERM must end it with exit code 0, unless the test has ended it."""
    named = ("--instance-id", "directory-0", "--port", str(port), "--log-level", "error")
    with running("directory", *named, *flags, token=TOKEN) as (process, _):
        yield process


class Questions:
    """Calls to the directory."""

    def __init__(self, stub: "directory_pb2_grpc.DirectoryAsyncStub", channels: Channels) -> None:
        self._stub = stub
        self._channels = channels

    async def nodes(self) -> dict[str, directory_pb2.StoreNodeView]:
        reply = await self._channels.call(self._stub.GetNodes, directory_pb2.GetNodesRequest(), timeout_s=PATIENCE_S)
        return {node.endpoint.instance_id: node for node in reply.nodes}

    async def holders(self, keys: Sequence[BlockKey]) -> list[set[str]]:
        """Returns for each key the ids of the nodes that hold it."""
        request = directory_pb2.LocateRequest(keys=pack_keys(keys))
        reply = await self._channels.call(self._stub.Locate, request, timeout_s=PATIENCE_S)
        names = [node.instance_id for node in reply.nodes]
        return [{names[n] for n in holders.nodes} for holders in reply.holders]

    async def until_in_step(self, *names: str) -> None:
        """Waits until the directory knows exactly these nodes and is in step with each of them."""
        await answered(self.nodes, lambda nodes: set(nodes) == set(names) and all(n.in_step for n in nodes.values()))


@contextlib.asynccontextmanager
async def asking(address: str) -> AsyncIterator[Questions]:
    """Connects to the directory at `address`."""
    async with Channels(TOKEN) as channels:
        yield Questions(directory_pb2_grpc.DirectoryStub(channels.to(address)), channels)
