"""Token streams of a worker: one per gateway, with the tokens of all its requests.

Sending never blocks. While a gateway is disconnected its events are queued; after a grace period its requests are given
up (`on_lost`). A broken stream loses the batches that it had taken, and the worker may notice later than the gateway.
So each stream starts with the number of batches taken before and of times that the gateway was given up (`Standing`). A
gateway with other numbers has missed events, maybe a request's last token, and asks again for all its requests here. No
acknowledgements are needed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence

from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.pb import worker_pb2
from moonserve.protocol.request import DecodeReport, GatewayId, PrefillReport, RequestId, Token
from moonserve.protocol.rpc.wire import failure_to_wire, to_message, token_to_wire

# Limit of remembered gateways that were given up. Each start of a gateway has a new id, and most of them are dead.
MAX_REMEMBERED = 4096

KEEPALIVE_S = 5.0
"""Silence after which a stream sends an empty batch, since the connection of a stopped process stays open."""


class _Outbox:
    """Queued events for one gateway that no stream has taken yet."""

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
    """Waits until there are events or an empty batch is due."""
    sign = asyncio.get_running_loop().call_later(KEEPALIVE_S, outbox.filled.set)
    try:
        await outbox.filled.wait()
    finally:
        sign.cancel()


class GatewayStreams:
    """All streams of one worker. It must be used in the event loop's thread only."""

    def __init__(self, on_lost: Callable[[GatewayId], None], grace_s: float = 5.0) -> None:
        self._on_lost = on_lost
        self._grace_s = grace_s
        self._outboxes: dict[GatewayId, _Outbox] = {}
        self._given_up: OrderedDict[GatewayId, int] = OrderedDict()  # number of times; oldest first
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
        """Queues events for a gateway. All events queued before its stream wakes up are sent as one message."""
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
        """Yields a gateway's batches; the body of `Worker.Events`. A gateway's newer stream replaces the older one."""
        outbox = self._outbox(gateway_id)
        stream = outbox.stream = object()
        outbox.filled.set()  # wakes an older stream, which sees its successor and ends
        self._keep(outbox)
        try:
            # The first message confirms the stream and lets the gateway detect missed events.
            given_up, num_batches = self._given_up.get(gateway_id, 0), outbox.num_taken
            yield worker_pb2.EventBatch(standing=worker_pb2.Standing(times_given_up=given_up, num_batches=num_batches))
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
        """Ends every stream once it has sent its queued events, so that gateways see an orderly end."""
        self._is_finishing = True
        for outbox in self._outboxes.values():
            outbox.filled.set()

    def close(self) -> None:
        """Forgets all gateways without calling `on_lost`."""
        for outbox in self._outboxes.values():
            self._keep(outbox)
        self._outboxes.clear()

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
