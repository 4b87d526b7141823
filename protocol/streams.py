"""A worker's streams to gateways: one per gateway, carrying the tokens of all its requests.

Sending never blocks: while a gateway is away its events wait, and when it stays away longer than the grace its
requests are given up (`on_lost`). A stream that breaks loses what it had taken, and the worker may notice later than
the gateway. So each stream begins with how many batches were taken before and how often the gateway was given up
(`Standing`): a gateway that knows otherwise has missed something, maybe a request's last token, and asks again for
all that it has here. Nothing needs acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence

from protocol.errors import MoonserveError
from protocol.ids import GatewayId, RequestId
from protocol.pb import worker_pb2
from protocol.request import DecodeReport, PrefillReport, Token
from protocol.rpc import failure_to_wire
from protocol.wire import to_message, token_to_wire

# Of gateways that were given up. A gateway's start has an id of its own, and most that are given up are dead.
MAX_REMEMBERED = 4096

SIGN_OF_LIFE_S = 5.0
"""A stream sends an empty batch when it has had nothing to send for this long, since connections outlive a stopped
process."""


class _Outbox:
    """Events for one gateway that no stream has taken yet."""

    def __init__(self) -> None:
        self.batch = worker_pb2.EventBatch()
        self.num_taken = 0  # batches
        self.filled = asyncio.Event()
        self.stream: object | None = None  # identity of the stream that serves it
        self.giving_up: asyncio.TimerHandle | None = None

    def take(self) -> worker_pb2.EventBatch:
        batch, self.batch = self.batch, worker_pb2.EventBatch()
        self.num_taken += 1
        self.filled.clear()
        return batch


async def _filled(outbox: _Outbox) -> None:
    """Waits until there are events, or until a sign of life is due."""
    sign = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, outbox.filled.set)
    try:
        await outbox.filled.wait()
    finally:
        sign.cancel()


class GatewayStreams:
    """All streams of one worker. Used in the event loop's thread only."""

    def __init__(self, on_lost: Callable[[GatewayId], None], grace_s: float = 5.0) -> None:
        self._on_lost = on_lost
        self._grace_s = grace_s
        self._outboxes: dict[GatewayId, _Outbox] = {}
        self._given_up: OrderedDict[GatewayId, int] = OrderedDict()  # how often; oldest first
        self._is_finishing = False

    def send(
        self,
        gateway_id: GatewayId,
        *,
        tokens: Sequence[Token] = (),
        prefills: Sequence[PrefillReport] = (),
        decodes: Sequence[DecodeReport] = (),
        failures: Sequence[tuple[RequestId, MoonserveError]] = (),
    ) -> None:
        """Queues events for a gateway; everything queued before its stream wakes leaves as one message."""
        outbox = self._outbox(gateway_id)
        outbox.batch.prefills.extend(to_message(worker_pb2.PrefillReport, each) for each in prefills)
        outbox.batch.decodes.extend(to_message(worker_pb2.DecodeReport, each) for each in decodes)
        outbox.batch.tokens.extend(map(token_to_wire, tokens))
        outbox.batch.failures.extend(
            worker_pb2.RequestFailed(request_id=request_id, failure=failure_to_wire(error))
            for request_id, error in failures
        )
        outbox.filled.set()

    async def events(self, gateway_id: GatewayId) -> AsyncIterator[worker_pb2.EventBatch]:
        """The body of `Worker.Events`. A newer stream of the same gateway replaces an older one."""
        outbox = self._outbox(gateway_id)
        stream = outbox.stream = object()
        outbox.filled.set()  # an older stream wakes up, sees its successor and ends
        self._keep(outbox)
        try:
            # The first message tells the gateway that the stream stands, and what it has missed.
            yield self._first_batch(gateway_id, outbox)
            while True:
                await _filled(outbox)
                if outbox.stream is not stream:
                    return
                yield outbox.take()
                if self._is_finishing:
                    return
        finally:
            if outbox.stream is stream:
                outbox.stream = None
                if self._outboxes.get(gateway_id) is outbox:  # not after `close`
                    self._give_up_later(gateway_id, outbox)

    def finish(self) -> None:
        """Every stream ends in order once it has taken what waits for it: a gateway sees that nothing more comes."""
        self._is_finishing = True
        for outbox in self._outboxes.values():
            outbox.filled.set()

    def close(self) -> None:
        """Forgets all gateways without telling anyone."""
        for outbox in self._outboxes.values():
            self._keep(outbox)
        self._outboxes.clear()

    def _first_batch(self, gateway_id: GatewayId, outbox: _Outbox) -> worker_pb2.EventBatch:
        standing = worker_pb2.Standing(times_given_up=self._given_up.get(gateway_id, 0), num_batches=outbox.num_taken)
        return worker_pb2.EventBatch(standing=standing)

    def _outbox(self, gateway_id: GatewayId) -> _Outbox:
        outbox = self._outboxes.get(gateway_id)
        if outbox is None:
            outbox = self._outboxes[gateway_id] = _Outbox()
            self._give_up_later(gateway_id, outbox)
        return outbox

    def _give_up_later(self, gateway_id: GatewayId, outbox: _Outbox) -> None:
        loop = asyncio.get_running_loop()
        outbox.giving_up = loop.call_later(self._grace_s, self._give_up, gateway_id)

    def _keep(self, outbox: _Outbox) -> None:
        if outbox.giving_up is not None:
            outbox.giving_up.cancel()
            outbox.giving_up = None

    def _give_up(self, gateway_id: GatewayId) -> None:
        del self._outboxes[gateway_id]
        self._given_up[gateway_id] = self._given_up.pop(gateway_id, 0) + 1
        if len(self._given_up) > MAX_REMEMBERED:
            self._given_up.popitem(last=False)
        self._on_lost(gateway_id)
