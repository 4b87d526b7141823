"""`python -m benchmarks.coupled_worker`: a worker that prefills and decodes in one batch, behind our own gateway.

The opponent of `benchmarks.coupled_live`: what vLLM runs on each machine, from our parts. A step has the decoding
sequences first and then chunks of prompts, within one token budget; prompts share the worker's prefix cache. The
schedule is the decode worker's, which computes preempted sequences in chunks anyway: here every sequence begins so.
For the conductor it is two instances, a prefill worker that takes requests, and a decode worker that is named in
placements and never asked for anything; so gateway, placement, streams and client are the same on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from decode_worker import actions, events
from decode_worker.config import DecodeConfig
from decode_worker.limits import Limits
from decode_worker.sequence import Sequence as Running
from decode_worker.service import DecodeService
from decode_worker.servicers import WorkerServicer as NoSubmissions
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from engine.replica import Replica, load_replica
from prefill_worker import events as prefill_events
from prefill_worker.service import PrefillService
from prefill_worker.servicer import WorkerServicer
from protocol import process
from protocol.ids import RequestId
from protocol.keys import NO_PARENT
from protocol.membership import BlockLog, member, own_endpoint
from protocol.pb import common_pb2, conductor_pb2, worker_pb2, worker_pb2_grpc
from protocol.process import Lifecycle
from protocol.request import PrefillReport, Request
from protocol.rpc import RpcServer
from transfer import Segment, TransferEngine

STOP_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A request whose prompt nobody has computed."""

    request: Request


@dataclass(slots=True, eq=False, kw_only=True)
class _Prompt:
    """Until its first token."""

    submitted_at: float
    started_at: float | None = None  # when it got its blocks
    cached_tokens: int = 0
    num_published: int = 0  # blocks


class CoupledState(DecodeState):
    """A decode worker's automaton that takes requests from the first token of their prompts on. Pure."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        super().__init__(pool, limits)
        self._block_size = limits.block_size
        self._handlers = {**self._handlers, Submitted: self._submitted}
        self._prompts: dict[RequestId, _Prompt] = {}

    @property
    def queued_tokens(self) -> int:
        """Of prompts, to be computed before one that came now."""
        missing = (sequence.num_missing for sequence in self._schedule.holders())
        return sum(count for count in missing if count > 1)

    def handle(self, event: Any, now: float) -> list[actions.Action]:
        out = super().handle(event, now)
        for sequence in self._schedule.holders() if self._prompts else ():
            prompt = self._prompts.get(sequence.request.request_id)
            if prompt is not None and sequence.block_table:
                self._note(prompt, sequence, now)
        for action in out:
            if isinstance(action, actions.Fail):
                self._prompts.pop(action.request_id, None)
        return out

    def report(self, request_id: RequestId, now: float) -> PrefillReport | None:
        """With the first token, once."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None or prompt.started_at is None:
            return None
        return PrefillReport(
            request_id=request_id,
            cached_tokens=prompt.cached_tokens,
            queue_s=prompt.started_at - prompt.submitted_at,
            load_s=0.0,
            compute_s=now - prompt.started_at,
        )

    def forget(self, request_id: RequestId) -> None:
        """It ended before its first token."""
        self._prompts.pop(request_id, None)

    def _submitted(self, event: Submitted, now: float, out: list[actions.Action]) -> None:
        request = event.request
        self._prompts[request.request_id] = _Prompt(submitted_at=now)
        self._schedule.add(request, (), now + request.timeout_s)

    def _note(self, prompt: _Prompt, sequence: Running, now: float) -> None:
        """What of it is computed can be found by others from now on; how much was cached when it got its blocks."""
        computed, keys = sequence.slice.start, sequence.request.block_keys
        if prompt.started_at is None:
            prompt.started_at, prompt.cached_tokens = now, computed
            prompt.num_published = computed // self._block_size
        full = min(len(keys), computed // self._block_size)
        for index in range(prompt.num_published, full):
            parent = keys[index - 1] if index else NO_PARENT
            # Nothing leaves this process, so nobody verifies a checksum.
            self._pool.publish(sequence.block_table[index], keys[index], parent, 0)
        prompt.num_published = max(prompt.num_published, full)


class CoupledService(DecodeService):
    """Runs a CoupledState; its first tokens carry the report that a prefill worker's would."""

    def __init__(self, state: CoupledState, replica: Replica, *rest: Any) -> None:
        super().__init__(state, replica.thread, *rest)
        self._coupled = state

    def post(self, event: prefill_events.Event) -> None:
        """What `prefill_worker.servicer` delivers."""
        match event:
            case prefill_events.Submitted(request=request):
                self.handle(cast(Any, Submitted(request=request)))
            case prefill_events.CancelRequested(request_id=request_id):
                self._coupled.forget(request_id)
                self.handle(events.RequestCancelled(request_id=request_id))

    def status(self) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(load=self.load(), num_blocks=self.state.num_blocks)

    def prefill_load(self) -> conductor_pb2.Load:
        """What the conductor predicts queues from."""
        load = self.load()
        load.queued_tokens = self._coupled.queued_tokens
        return load

    def _send_tokens(self, action: actions.SendTokens) -> None:
        now = self.now
        reports = [self._coupled.report(token.request_id, now) for token in action.tokens]
        known = [report for report in reports if report is not None]
        self.streams.send(action.gateway_id, tokens=action.tokens, prefills=known)


class CoupledWorker:
    """One worker over a loaded replica, at two addresses."""

    def __init__(
        self, config: DecodeConfig, replica: Replica, transfer: TransferEngine, segment: Segment
    ) -> None:
        plan = replica.plan
        self._config, self._replica, self._transfer = config, replica, transfer
        self._blocks = BlockLog()
        pool = BlockPool(
            plan.num_blocks,
            on_added=self._blocks.added,
            on_removed=self._blocks.removed,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        state = CoupledState(pool, config.limits(plan))
        self.service = CoupledService(state, replica, transfer, segment, plan.layout)
        # Never asked for anything; its gateway's stream stays empty.
        self._idle = DecodeService(
            DecodeState(BlockPool(1, on_added=_ignore, on_removed=_ignore), config.limits(plan)),
            replica.thread,
            transfer,
            segment,
            plan.layout,
        )

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until told to stop."""
        servicer = WorkerServicer(
            cast(PrefillService, self.service),
            block_size=self._replica.plan.layout.block_size,
            vocab_size=self._replica.vocab_size,
        )
        async with contextlib.AsyncExitStack() as stack:
            ended = asyncio.Event()
            work = await stack.enter_async_context(process.running(self.service.run(ended)))
            taking = await self._listen(stack, servicer, self._config.port)
            naming = await self._listen(stack, NoSubmissions(self._idle), 0)
            taker = self._registration(taking, common_pb2.ROLE_PREFILL)
            named = self._registration(naming, common_pb2.ROLE_DECODE)
            seats = [
                await stack.enter_async_context(
                    member(self._config, taker, self.service.prefill_load, self._blocks)
                ),
                await stack.enter_async_context(
                    member(self._config, named, self.service.load, BlockLog())
                ),
            ]
            lifecycle.ready(rpc=taking)
            await lifecycle.until_stopped(work, *(task for seat in seats for task in seat.watched))
        self._replica.thread.close()

    async def _listen(self, stack: contextlib.AsyncExitStack, servicer: Any, port: int) -> str:
        server = RpcServer(self._config.cluster_token)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        address = await server.start(self._config.host, port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        return address

    def _registration(self, address: str, role: Any) -> conductor_pb2.RegisterRequest:
        name = self._config.instance_id
        instance_id = name if role == common_pb2.ROLE_PREFILL else f"{name}-named"
        endpoint = own_endpoint(
            instance_id, rpc_address=address, transfer_address=self._transfer.address
        )
        return self._replica.registration(endpoint, role)


def _ignore(*_: object) -> None:
    """Nobody is told of this pool."""


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Runs a coupled worker until the process is told to stop."""
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
    return process.main(DecodeConfig, serve, arguments, prog="python -m benchmarks.coupled_worker")


if __name__ == "__main__":
    sys.exit(main())
