"""The gRPC face of a prefill worker: submissions and cancellations in, token streams out.

Checks what a gateway sends before it becomes a request: one malformed submission must not fail the step it shares.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from prefill_worker import events as ev
from prefill_worker.service import PrefillService
from protocol.errors import InvalidRequest, NoWorker
from protocol.ids import GatewayId, RequestId
from protocol.logs import of
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.request import Request, SamplingParams
from protocol.wire import placement_from_wire, request_from_wire

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves `Worker`."""

    def __init__(
        self,
        service: PrefillService,
        *,
        block_size: int,
        vocab_size: int,
        prepare: Callable[[SamplingParams], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare`: awaited before a request comes to the service (`EngineThread.prepare`)."""
        self._service = service
        self._prepare = prepare
        self._block_size = block_size
        self._vocab_size = vocab_size
        self.draining = False

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: Context
    ) -> worker_pb2.SubmitReply:
        """Raises NoWorker while draining and InvalidRequest for what cannot be a request or be held to its grammar."""
        if self.draining:
            raise NoWorker("this prefill worker is draining", request=request.request_id)
        wish = self._parse(request)
        placement = placement_from_wire(request.placement)
        if not math.isfinite(placement.rank):
            raise InvalidRequest(
                f"rank {placement.rank} is no number of seconds", request=request.request_id
            )
        if self._prepare is not None:
            await self._prepare(wish.sampling)
        log.debug("taken: %d tokens", len(wish.token_ids), extra=of(wish.request_id))
        self._service.post(ev.Submitted(request=wish, placement=placement))
        return worker_pb2.SubmitReply()

    def _parse(self, message: worker_pb2.SubmitRequest) -> Request:
        try:
            request = request_from_wire(message)
        except ValueError as error:
            raise InvalidRequest(f"malformed submission: {error}") from error
        num_tokens, num_keys = len(request.token_ids), len(request.block_keys)
        ids = {"request": request.request_id}
        if not 0 < request.num_prompt_tokens <= num_tokens:
            raise InvalidRequest(
                f"{request.num_prompt_tokens} prompt tokens among {num_tokens} tokens", **ids
            )
        if num_keys != num_tokens // self._block_size:
            raise InvalidRequest(
                f"{num_keys} block keys for {num_tokens} tokens in blocks of {self._block_size}",
                **ids,
            )
        if max(request.token_ids) >= self._vocab_size:
            raise InvalidRequest(
                f"token id {max(request.token_ids)} is not below the vocabulary's "
                f"{self._vocab_size}",
                **ids,
            )
        return request

    async def Cancel(
        self, request: worker_pb2.CancelRequest, context: Context
    ) -> worker_pb2.CancelReply:
        self._service.post(ev.CancelRequested(request_id=RequestId(request.request_id)))
        return worker_pb2.CancelReply()

    async def Events(
        self, request: worker_pb2.EventsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        async for batch in self._service.streams.events(GatewayId(request.gateway_id)):
            yield batch

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: Context
    ) -> worker_pb2.WorkerStatus:
        return self._service.status()
