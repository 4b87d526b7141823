"""RPC service for submissions to a prefill worker. Checks them before they become requests, since a malformed
submission must not fail the step that it shares with others."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

from protocol.errors import InvalidRequest, NoWorker
from protocol.logs import of
from protocol.pb import worker_pb2
from protocol.request import Placement, Request, SamplingParams
from protocol.wire import from_message, request_from_wire
from worker.events import Submitted
from worker.service import Context, WorkerService, WorkerServicer

log = logging.getLogger(__name__)


class PrefillServicer(WorkerServicer):
    """Serves `Worker` to gateways, including submissions."""

    def __init__(
        self,
        service: WorkerService,
        *,
        block_size: int,
        vocab_size: int,
        prepare: Callable[[SamplingParams], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` is awaited before a request reaches the service (`EngineThread.prepare`)."""
        super().__init__(service)
        self._prepare = prepare
        self._block_size = block_size
        self._vocab_size = vocab_size

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        """Submits a request. Raises NoWorker while draining, InvalidRequest for a malformed request or grammar."""
        if self._service.is_draining:
            raise NoWorker("this prefill worker is draining", request=request.request_id)
        wish = self._parse(request)
        placement = from_message(Placement, request.placement)
        if not math.isfinite(placement.rank):
            raise InvalidRequest(f"rank {placement.rank} is no number of seconds", request=request.request_id)
        if self._prepare is not None:
            await self._prepare(wish.sampling)
        log.debug("taken: %d tokens", len(wish.token_ids), extra=of(wish.request_id))
        self._service.post(Submitted(request=wish, placement=placement))
        return worker_pb2.SubmitReply()

    def _parse(self, message: worker_pb2.SubmitRequest) -> Request:
        try:
            request = request_from_wire(message)
        except ValueError as error:
            raise InvalidRequest(f"malformed submission: {error}") from error
        num_tokens, num_keys = len(request.token_ids), len(request.block_keys)
        wrong = ""
        if not 0 < request.num_prompt_tokens <= num_tokens:
            wrong = f"{request.num_prompt_tokens} prompt tokens among {num_tokens} tokens"
        elif num_keys != num_tokens // self._block_size:
            wrong = f"{num_keys} block keys for {num_tokens} tokens in blocks of {self._block_size}"
        elif (largest := max(request.token_ids)) >= self._vocab_size:
            wrong = f"token id {largest} is not below the vocabulary's {self._vocab_size}"
        if wrong:
            raise InvalidRequest(wrong, request=request.request_id)
        return request
