"""The RPC service for prefill workers. Translates between wire messages and the service's events; decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from decode_worker import events
from decode_worker.service import DecodeService
from protocol.checksum import join
from protocol.errors import Incompatible, InvalidRequest
from protocol.ids import LeaseId
from protocol.keys import unpack_keys
from protocol.logs import of
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.request import SamplingParams
from protocol.wire import from_message, request_from_wire, to_message
from worker.service import Context

log = logging.getLogger(__name__)

MAX_TTL_S = 60.0
# Upper limit, and the value for callers that set no deadline.
MAX_WAIT_S = 60.0
# A refusal must still reach its caller before the call's own deadline.
ANSWER_MARGIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingZone:
    """Address and properties of the memory that prefill workers write to."""

    transfer_address: str
    segment_id: int
    num_blocks: int
    block_size: int
    fingerprint: str


class LandingServicer(worker_pb2_grpc.LandingServicer):
    """Serves `Landing` to prefill workers: reserve, renew, commit and release."""

    def __init__(
        self,
        service: DecodeService,
        zone: LandingZone,
        prepare: Callable[[SamplingParams], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` is awaited before a committed request reaches the service (`EngineThread.prepare`)."""
        self._service = service
        self._zone = zone
        self._prepare = prepare

    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Context) -> worker_pb2.LandingLease:
        event = self._reservation(request, context.time_remaining())
        grant, window_id = await self._service.reserve(event)
        return to_message(
            worker_pb2.LandingLease,
            self._zone,
            lease_id=grant.lease_id,
            block_ids=grant.blocks,
            num_cached_blocks=grant.num_cached,
            window_id=window_id or 0,  # unset when nothing is to be written
            ttl_s=grant.ttl_s,
        )

    async def Renew(self, request: worker_pb2.RenewRequest, context: Context) -> worker_pb2.RenewReply:
        lease_id = LeaseId(request.lease_id)
        await self._service.renew(events.LeaseRenewed(lease_id=lease_id, ttl_s=_ttl_s(request.ttl_s)))
        return worker_pb2.RenewReply()

    async def Commit(self, request: worker_pb2.CommitRequest, context: Context) -> worker_pb2.CommitReply:
        try:
            committed = request_from_wire(request)
        except ValueError as error:
            raise InvalidRequest(str(error), request=request.request_id) from error
        if self._prepare is not None:
            await self._prepare(committed.sampling)
        corrupt = await self._service.commit(
            events.CommitRequested(
                lease_id=LeaseId(request.lease_id),
                request=committed,
                checksums=_checksums(request),
                part_layers=tuple(request.part_layers),
                transfer_s=request.transfer_s,
            )
        )
        if not corrupt:
            text = "landed: %d blocks, %.3f s after its first token"
            whose = of(committed.request_id)
            log.debug(text, len(committed.block_keys), request.transfer_s, extra=whose)
        return worker_pb2.CommitReply(corrupt=corrupt)

    async def Release(self, request: worker_pb2.ReleaseRequest, context: Context) -> worker_pb2.ReleaseReply:
        self._service.post(events.LeaseReleased(lease_id=LeaseId(request.lease_id)))
        return worker_pb2.ReleaseReply()

    def _reservation(self, request: worker_pb2.ReserveRequest, remaining_s: float | None) -> events.ReserveRequested:
        """Returns the event of a valid request. Raises Incompatible or InvalidRequest."""
        self._require_same_fingerprint(request)
        try:
            keys = tuple(unpack_keys(request.block_keys))
        except ValueError as error:
            raise InvalidRequest(str(error), request=request.request_id) from error
        if not request.lease_id or not request.request_id or request.num_tokens < 1:
            raise InvalidRequest("a reservation needs ids and at least one token")
        if len(keys) != request.num_tokens // self._zone.block_size:
            raise InvalidRequest(
                f"{len(keys)} block keys for {request.num_tokens} tokens in blocks of {self._zone.block_size}",
                request=request.request_id,
            )
        wait_s = MAX_WAIT_S if remaining_s is None else min(remaining_s, MAX_WAIT_S)
        return from_message(
            events.ReserveRequested,
            request,
            block_keys=keys,
            ttl_s=_ttl_s(request.ttl_s),
            deadline_at=self._service.now + max(0.0, wait_s - ANSWER_MARGIN_S),
            num_prompt_tokens=request.num_prompt_tokens or None,
        )

    def _require_same_fingerprint(self, request: worker_pb2.ReserveRequest) -> None:
        if request.fingerprint != self._zone.fingerprint:
            raise Incompatible(
                "the prefill worker's weights or KV layout differ from this decode worker's",
                prefill=request.fingerprint,
                decode=self._zone.fingerprint,
            )


def _checksums(request: worker_pb2.CommitRequest) -> tuple[int, ...]:
    """Returns one checksum per block, joining those of a block's parts. Raises InvalidRequest if some are missing."""
    num_parts = max(1, len(request.part_layers))
    if len(request.checksums) % num_parts:
        raise InvalidRequest(
            f"{len(request.checksums)} checksums of blocks in {num_parts} parts",
            request=request.request_id,
        )
    starts = range(0, len(request.checksums), num_parts)
    return tuple(join(request.checksums[start : start + num_parts]) for start in starts)


def _ttl_s(wish_s: float) -> float:
    if not wish_s > 0.0:
        raise InvalidRequest(f"a lease of {wish_s} s is none", param="ttl_s")
    return min(wish_s, MAX_TTL_S)
