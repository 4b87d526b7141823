"""Plain keys and values of one node, given by its endpoint, over gRPC and leases.

A plain key is any bytes up to 64 KiB and is stored under its digest; a value is any bytes that fit into the node's
segment, the empty ones included. Missing, empty, unreachable and full are four different answers.
"""

from __future__ import annotations

from kvstore.block_client import PATIENCE, BlockClient, left, now, right_s
from kvstore.client.keys import plain_key
from kvstore.objects import PutObject, ReadLease
from kvstore.promises import Outcome
from protocol.checksum import checksum
from protocol.errors import DeadlineExceeded, IntegrityError, InvalidRequest, Overloaded
from protocol.request import Endpoint
from protocol.rpc import Channels
from tests.kvstore.scratch import Scratch
from transfer import TransferEngine

# Leaves time to say so when another writer has not finished.
WAIT_SHARE = 0.9


class StoreClient(BlockClient):
    """Blocks, and plain keys and values."""

    def __init__(self, channels: Channels, transfer: TransferEngine) -> None:
        super().__init__(channels, transfer)
        self._scratch = Scratch(transfer)

    async def close(self) -> None:
        """Waits for what is being given back."""
        await super().close()
        self._scratch.close()

    async def get(
        self, store: Endpoint, key: bytes, *, deadline_s: float | None = None
    ) -> bytes | None:
        """The value of a plain key; None when there is none, `b""` when it is empty.

        Without a deadline it takes as long as its bytes may (`transfer.patience`). Raises PeerLost when the node cannot
        be reached, IntegrityError when the value had rotted (it is then removed).
        """
        first_s = PATIENCE.base_s if deadline_s is None else deadline_s
        give_up_at = now() + first_s
        ttl_s = right_s(first_s)
        lease = await self.lease(store, [plain_key(key)], ttl_s=ttl_s, timeout_s=first_s)
        if not lease.objects:
            return None
        try:
            if deadline_s is None:
                give_up_at = now() + PATIENCE.deadline_s(lease.objects[0].length)
                lease = await self._lasting(lease, give_up_at)
            value = await self._read_value(lease, give_up_at)
        except BaseException:  # cancellation too
            self.release_soon(lease)
            raise
        await self.release(lease)  # waited for, so that a following put finds the space
        return value

    async def put_bytes(
        self, store: Endpoint, key: bytes, value: bytes, *, deadline_s: float | None = None
    ) -> None:
        """Stores a value under a plain key; readable by everybody when this returns. Deadline as in `get`.

        Values are immutable: storing an equal one again succeeds, also beside another writer of it. Raises
        InvalidRequest (another value is there; the value can never fit), Overloaded (no space that could be had),
        IntegrityError (it arrived damaged), PeerLost, DeadlineExceeded.
        """
        if deadline_s is None:
            deadline_s = PATIENCE.deadline_s(len(value))
        give_up_at = now() + deadline_s
        async with self._scratch.borrow(len(value)) as local:
            local.buffer[: len(value)] = value
            wish = PutObject(
                key=plain_key(key),
                parent=None,
                checksum=checksum([value]),
                pieces=[(0, len(value))],
            )
            [outcome], corrupt = await self._put(
                store, [wish], local, give_up_at, wait_share=WAIT_SHARE
            )
        if corrupt:
            raise IntegrityError("the value arrived damaged and was dropped")
        if outcome is Outcome.FULL:
            raise Overloaded("the store is full of objects in use", retry_after_s=1.0)
        if outcome is Outcome.IN_PROGRESS:
            raise DeadlineExceeded("another writer of this key did not finish in time")
        if outcome is Outcome.PRESENT:
            await self._require_equal(store, wish, give_up_at)

    async def _lasting(self, lease: ReadLease, until: float) -> ReadLease:
        """The lease, renewed when it would end before."""
        if lease.expires_at >= until:
            return lease
        return await self.renew(lease, ttl_s=right_s(until - now()))

    async def _read_value(self, lease: ReadLease, give_up_at: float) -> bytes:
        [stored] = lease.objects
        async with self._scratch.borrow(stored.length) as local:
            place = [(0, stored.length)]
            if not await self.read(lease, local, [place], deadline_s=left(give_up_at)):
                raise IntegrityError("the value did not match its checksum and was removed")
            return bytes(local.buffer[: stored.length])

    async def _require_equal(self, store: Endpoint, wish: PutObject, give_up_at: float) -> None:
        """Raises InvalidRequest when another value is stored under the key."""
        lease = await self.lease(store, [wish.key], timeout_s=left(give_up_at))
        await self.release(lease)
        for stored in lease.objects:  # none, when it has been removed since: then it had been there
            if (stored.length, stored.checksum) != (wish.length, wish.checksum):
                raise InvalidRequest("another value is stored under this key; remove it first")
