"""`python -m benchmarks.serving.coupled_worker`: a worker that prefills and decodes in one batch, behind moonserve's
gateway.

It is the coupled side of `benchmarks.serving.coupled`: vLLM's design of a worker, built from moonserve's parts. A step
has the decoding sequences first and then chunks of prompts, within one token budget; prompts share the worker's prefix
cache. It is the decode worker that also prefills (`local_prefill`), without stores and without a time budget. It
registers as two instances: a prefill worker that accepts requests, and a decode worker that is named in placements but
never receives a request. Gateway, placement, streams and client are therefore the same on both sides.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.local_prefill.state import LocalPrefillState
from moonserve.decode_worker.local_prefill.worker import LocalPrefillService
from moonserve.decode_worker.service import DecodeService
from moonserve.decode_worker.state import DecodeState
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.replica import Replica, load_replica
from moonserve.protocol.membership.heartbeats import BlockLog, conductor_membership, own_endpoint
from moonserve.protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from moonserve.protocol.process import lifecycle
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.transfer import Segment, TransferEngine
from moonserve.worker.process import KvMemory
from moonserve.worker.service import PrefillServicer, WorkerServicer

STOP_GRACE_S = 0.5


class CoupledWorker:
    """A worker on one loaded replica that serves two addresses."""

    def __init__(self, config: DecodeConfig, replica: Replica, transfer: TransferEngine, segment: Segment) -> None:
        plan = replica.plan
        self._config, self._replica, self._transfer = config, replica, transfer
        self._blocks = BlockLog()
        pool = BlockPool(
            plan.num_blocks,
            on_added=self._blocks.added,
            on_removed=self._blocks.removed,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        state = LocalPrefillState(pool, config.limits(plan))
        memory = KvMemory(segment, plan.layout, plan.num_blocks)
        self.service = LocalPrefillService(state, replica.thread, transfer, memory)
        # Never receives a request; its stream to the gateway stays empty.
        self._idle = DecodeService(
            DecodeState(BlockPool(1, on_added=_ignore, on_removed=_ignore), config.limits(plan)),
            replica.thread,
            transfer,
            KvMemory(segment, plan.layout, 1),
        )

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until the lifecycle stops it, or a part fails."""
        servicer = PrefillServicer(
            self.service,
            block_size=self._replica.plan.layout.block_size,
            vocab_size=self._replica.vocab_size,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.service.stop)
            taking = await self._listen(stack, servicer, self._config.port)
            naming = await self._listen(stack, WorkerServicer(self._idle), 0)
            taker = self._registration(taking, common_pb2.ROLE_PREFILL)
            named = self._registration(naming, common_pb2.ROLE_DECODE)
            seats = [
                await stack.enter_async_context(
                    conductor_membership(self._config, taker, self.service.load, self._blocks)
                ),
                await stack.enter_async_context(
                    conductor_membership(self._config, named, self.service.load, BlockLog())
                ),
            ]
            lifecycle.ready(rpc=taking)
            await lifecycle.wait_for_stop(self.service.failed, *(task for seat in seats for task in seat.watched))
        self._replica.thread.close()

    async def _listen(self, stack: contextlib.AsyncExitStack, servicer: Any, port: int) -> str:
        server = RpcServer(self._config.cluster_token, self._config.tls())
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        address = await server.start(self._config.host, port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        return address

    def _registration(self, address: str, role: Any) -> conductor_pb2.RegisterRequest:
        name = self._config.instance_id
        instance_id = name if role == common_pb2.ROLE_PREFILL else f"{name}-named"
        endpoint = own_endpoint(instance_id, rpc_address=address, transfer_address=self._transfer.address)
        return self._replica.registration(endpoint, role)


def _ignore(*_: object) -> None:
    """Ignores changes of the pool, which nothing reports."""


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Runs a coupled worker until the process is stopped."""
    transfer = TransferEngine(
        cluster_token=config.cluster_token,
        name=config.instance_id,
        options=config.transfer_options(config.host),
    )
    with transfer:
        replica, segment = await load_replica(config, transfer.allocate, lifecycle)
        await CoupledWorker(config, replica, transfer, segment).run(lifecycle)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = None if argv is None else list(argv)
    return lifecycle.main(DecodeConfig, serve, arguments, prog="python -m benchmarks.serving.coupled_worker")


if __name__ == "__main__":
    sys.exit(main())
