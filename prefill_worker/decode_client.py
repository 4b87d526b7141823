"""The prefill side of the `Landing` service of decode workers: reserve, renew, commit, release."""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.events import CommitHandoff, ReserveLanding
from moonserve.protocol.errors import MoonserveError, PeerError, PeerLost
from moonserve.protocol.kv_blocks import pack_keys, pack_tokens, unpack_checksums
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import Endpoint, LeaseId
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import from_message, sampling_to_wire, to_message

# If a decode worker is full for this long, the request should be placed elsewhere.
RESERVE_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 5.0
# Committing verifies every landed byte: a second covers ten gigabytes.
COMMIT_TIMEOUT_S = 10.0


class DecodeClient:
    """Client for any decode worker. Calls are idempotent by lease id."""

    def __init__(
        self,
        channels: Channels,
        *,
        fingerprint: str,
        ttl_s: float,
        part_layers: Sequence[int] = (),
    ) -> None:
        """`part_layers`: in a pipeline, the number of layers that each stage's checksums cover."""
        self._channels = channels
        self._fingerprint = fingerprint
        self._ttl_s = ttl_s
        self._part_layers = part_layers

    def _stub(self, decode: Endpoint) -> worker_pb2_grpc.LandingAsyncStub:
        stub: worker_pb2_grpc.LandingAsyncStub = worker_pb2_grpc.LandingStub(self._channels.to(decode.rpc_address))
        return stub

    async def reserve(self, action: ReserveLanding) -> ev.Landing:
        """Reserves landing blocks. Raises MoonserveError if refused, unreachable, or not granted in time."""
        request = to_message(
            worker_pb2.ReserveRequest,
            action,
            fingerprint=self._fingerprint,
            block_keys=pack_keys(action.block_keys),
            ttl_s=self._ttl_s,
        )
        timeout_s = min(action.timeout_s, RESERVE_TIMEOUT_S)
        lease = await self._channels.call(self._stub(action.decode).Reserve, request, timeout_s=timeout_s)
        return _landing_from_wire(lease, action.num_tokens)

    async def renew(self, decode: Endpoint, lease_id: LeaseId) -> None:
        """Renews a lease. Raises PeerLost if there is no answer and another MoonserveError if the lease has ended."""
        request = worker_pb2.RenewRequest(lease_id=lease_id, ttl_s=self._ttl_s)
        await self._channels.call(self._stub(decode).Renew, request, timeout_s=CALL_TIMEOUT_S)

    async def commit(self, action: CommitHandoff) -> tuple[int, ...]:
        """Commits a handoff. Returns the indexes of corrupt blocks; empty means accepted. Raises MoonserveError."""
        request = _commit_to_wire(action, self._part_layers)
        stub = self._stub(action.decode)
        timeout_s = max(min(action.timeout_s, COMMIT_TIMEOUT_S), CALL_TIMEOUT_S)
        try:
            reply = await self._channels.call(stub.Commit, request, timeout_s=timeout_s)
        except PeerLost:  # perhaps only the answer was lost; commits are idempotent
            reply = await self._channels.call(stub.Commit, request, timeout_s=CALL_TIMEOUT_S)
        return _corrupt_from_wire(reply, action)

    async def release(self, decode: Endpoint, lease_id: LeaseId) -> None:
        """Releases a lease. Raises MoonserveError if the call fails; the lease then expires by itself."""
        request = worker_pb2.ReleaseRequest(lease_id=lease_id)
        await self._channels.call(self._stub(decode).Release, request, timeout_s=CALL_TIMEOUT_S)


def _landing_from_wire(lease: worker_pb2.LandingLease, num_tokens: int) -> ev.Landing:
    if lease.num_cached_blocks > len(lease.block_ids) or not lease.block_ids:
        raise PeerError(f"a landing of {len(lease.block_ids)} blocks for {num_tokens} tokens")
    return from_message(ev.Landing, lease, block_ids=tuple(lease.block_ids))


def _corrupt_from_wire(reply: worker_pb2.CommitReply, action: CommitHandoff) -> tuple[int, ...]:
    """Returns the corrupt block indexes of a reply. Raises PeerError for a block that was not sent."""
    num_blocks = action.num_cached_blocks + len(action.checksums)
    if any(not action.num_cached_blocks <= index < num_blocks for index in reply.corrupt):
        raise PeerError(f"corrupt blocks {list(reply.corrupt)} of {num_blocks}")
    return tuple(reply.corrupt)


def _commit_to_wire(action: CommitHandoff, part_layers: Sequence[int]) -> worker_pb2.CommitRequest:
    request, num_parts = action.request, max(1, len(part_layers))
    return to_message(
        worker_pb2.CommitRequest,
        request,
        lease_id=action.lease_id,
        token_ids=pack_tokens((*request.token_ids, action.first_token_id)),
        block_keys=pack_keys(request.block_keys),
        checksums=[part for joined in action.checksums for part in unpack_checksums(joined, num_parts)],
        part_layers=part_layers,
        sampling=sampling_to_wire(request.sampling),
        timeout_s=action.timeout_s,
        transfer_s=action.transfer_s,
    )


def lease_has_ended(error: MoonserveError) -> bool:
    """Returns True if a failed renewal means that the lease has ended, not only that one call got no answer."""
    return not isinstance(error, PeerLost)
