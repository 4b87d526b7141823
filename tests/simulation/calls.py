"""Simulated gRPC transport for the product's generated stubs and servicers. Messages are serialized to bytes.

It fails as gRPC does. A refused or broken connection is UNAVAILABLE. A call without an answer ends at its deadline, or
by keepalive if a link stays cut or, except for lean calls, a peer stays stopped. A server cancels the handler of a
caller that has gone away. A unary call may be late, lost or duplicated, or its answer may be lost.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from moonserve.protocol.rpc.grpc_transport import Channels, _guard_stream, _guard_unary
from tests.simulation.loop import OUTSIDE, Life
from tests.simulation.network import TOO_LATE, UNAVAILABLE, Connection, Context, Network, Server, rpc_error

REDIAL_S = 0.2


class SimulatedChannels(Channels):
    """The product's `Channels` over the simulated network."""

    def __init__(self, network: Network, life: Life) -> None:
        super().__init__("token")
        self._network, self._life = network, life

    def _open(self, address: str) -> Any:
        return _Channel(self._network, self._life, address)


class _Channel:
    """The part of a gRPC channel that generated stubs use."""

    def __init__(self, *way: Any) -> None:
        """`way`: a network, the caller's life and an address."""
        self._way = way

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        async def call(request: Any, *, timeout: float, metadata: Any = (), wait_for_ready: bool = False) -> Any:
            asked = Call(*self._way, path, request_serializer(request), timeout)
            return response_deserializer(await asked.answer(wait_for_ready))

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        def call(request: Any, *, metadata: Any = ()) -> Stream:
            return Stream(*self._way, path, request_serializer(request), response_deserializer)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Does nothing: each call ends by itself."""


class _Exchange:
    """A request and its handler at the server. Subclasses implement `handle`, which runs at the server, and `deliver`,
    which takes the result at the caller."""

    def __init__(self, network: Network, caller: Life, address: str, path: str, data: bytes) -> None:
        self._network, self._loop = network, network.loop
        self._caller, self._address, self._path, self._data = caller, address, path, data

    def deliver(self, outcome: bytes | Exception) -> None:
        raise NotImplementedError

    async def handle(self, server: Server, connection: Connection) -> None:
        raise NotImplementedError

    def _refused(self, details: str = "Connection refused") -> None:
        error = rpc_error(UNAVAILABLE, details)
        self._loop.call_later(self._network.latency(), self.deliver, error, context=OUTSIDE)

    def _connect(self, server: Server) -> Connection:
        is_lean = self._network.rng.random() < 0.5  # a caller that knows the lean address uses it
        connection = Connection(self._caller, server.life, lambda: self._broken(connection), is_lean)
        return connection

    def _send(self, server: Server, connection: Connection, after_s: float = 0.0) -> None:
        def arrive() -> None:
            if not connection.is_over and server.life.is_alive:
                server.life.soon(self._serve, server, connection)

        self._network.send(self._caller, server.life, arrive, after_s)

    def _serve(self, server: Server, connection: Connection) -> None:
        """Starts the handler at the server."""
        if not connection.is_over:
            connection.task = server.life.spawn(self.handle(server, connection))

    def _broken(self, connection: Connection) -> None:
        """Breaks the connection. Both ends that are alive are notified."""
        if not connection.is_over:
            self._network.closed(connection)
            self.deliver(rpc_error(UNAVAILABLE, "Socket closed"))
            connection.end_handler()

    def _abandon(self, connection: Connection) -> None:
        """Ends the exchange at the caller and notifies the server."""
        if not connection.is_over:
            self._network.closed(connection)
            self._network.send(self._caller, connection.server, connection.end_handler)


class Call(_Exchange):
    """A unary call."""

    def __init__(self, network: Network, caller: Life, address: str, path: str, data: bytes, timeout_s: float) -> None:
        super().__init__(network, caller, address, path, data)
        self._ends_at = self._loop.time() + timeout_s
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self._connections: list[Connection] = []  # without those of duplicates
        self._loses_answer = False

    async def answer(self, wait_for_ready: bool) -> bytes:
        timer = self._loop.call_at(self._ends_at, self.deliver, rpc_error(TOO_LATE, "Deadline Exceeded"))
        try:
            self._begin(wait_for_ready)
            return await self._answer
        finally:
            timer.cancel()
            for connection in self._connections:
                self._abandon(connection)

    def deliver(self, outcome: bytes | Exception) -> None:
        if self._answer.done():
            return
        if isinstance(outcome, Exception):
            self._answer.set_exception(outcome)
        else:
            self._answer.set_result(outcome)

    def _begin(self, wait_for_ready: bool) -> None:
        network = self._network
        server = network.server_at(self._address)
        if server is None or network.is_cut(self._caller, server.life):
            if wait_for_ready:
                self._loop.call_later(REDIAL_S, lambda: self._answer.done() or self._begin(True))
                return
            if server is None:
                self._refused()
                return
            if network.rng.random() < 0.5:  # there is no connection yet, and it cannot be opened
                network.unanswered.append(self.deliver)
                return
        is_lost = network.loses()
        how = network.rng.randrange(3) if is_lost else None
        if how == 0:  # the connection breaks before the request arrives
            self._refused("Connection reset by peer")
            return
        if how == 2:  # no answer ever comes
            network.unanswered.append(self.deliver)
            return
        self._loses_answer = is_lost  # the connection breaks before the answer arrives
        connection = self._connect(server)
        network.opened(connection)
        self._connections.append(connection)
        self._send(server, connection)
        if not is_lost and network.rng.random() < network.weather.duplication:
            self._send(server, self._connect(server), after_s=network.rng.uniform(0.0, 2.0))

    def _serve(self, server: Server, connection: Connection) -> None:
        super()._serve(server, connection)
        if connection.task is not None and connection in self._connections:
            self._loop.call_at(self._ends_at, connection.task.cancel)

    async def handle(self, server: Server, connection: Connection) -> None:
        handler = server.handlers[self._path]
        context = Context(self._loop, self._ends_at)
        outcome: bytes | Exception
        try:
            request = handler.request_deserializer(self._data)
            reply = await _guard_unary(handler.unary_unary, True, None)(request, context)
            outcome = handler.response_serializer(reply)
        except grpc.aio.AbortError:
            outcome = context.error()
        if connection not in self._connections:
            return
        if self._loses_answer:
            outcome = rpc_error(UNAVAILABLE, "Connection reset by peer")

        def arrive() -> None:
            if not connection.is_over:
                self._network.closed(connection)
                self.deliver(outcome)

        self._network.send(server.life, self._caller, arrive)


class Stream(_Exchange):
    """A server's stream at its caller. Messages keep their order; those in flight when the stream breaks are lost."""

    def __init__(
        self, network: Network, caller: Life, address: str, path: str, data: bytes, deserialize: Callable[[bytes], Any]
    ) -> None:
        super().__init__(network, caller, address, path, data)
        self._deserialize = deserialize
        self._arrived: deque[bytes | Exception] = deque()
        self._on_its_way: deque[bytes | Exception] = deque()
        self._waiting = asyncio.Event()
        self._connection: Connection | None = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        self._begin()
        while True:
            while self._arrived:
                item = self._arrived.popleft()
                if isinstance(item, Exception):
                    raise item
                yield self._deserialize(item)
            self._waiting.clear()
            await self._waiting.wait()

    def cancel(self) -> None:
        if self._connection is not None:
            self._abandon(self._connection)

    def deliver(self, outcome: bytes | Exception) -> None:
        self._arrived.append(outcome)
        self._waiting.set()

    def _begin(self) -> None:
        server = self._network.server_at(self._address)
        if server is None or self._network.loses():
            self._refused()
            return
        connection = self._connection = self._connect(server)
        self._network.opened(connection)
        self._send(server, connection)

    async def handle(self, server: Server, connection: Connection) -> None:
        handler = server.handlers[self._path]
        context = Context(self._loop)
        ended: Exception = rpc_error(UNAVAILABLE, "the stream ended")
        try:
            request = handler.request_deserializer(self._data)
            async for message in _guard_stream(handler.unary_stream, True)(request, context):
                self._push(connection, handler.response_serializer(message))
        except grpc.aio.AbortError:
            ended = context.error()
        self._push(connection, ended)

    def _push(self, connection: Connection, item: bytes | Exception) -> None:
        """Sends a message from the server, or breaks the connection instead."""
        network = self._network
        if network.loses():
            network.send(connection.server, connection.caller, connection.break_off)
            return
        self._on_its_way.append(item)

        def arrive() -> None:
            """Delivers the oldest message in flight."""
            if not connection.is_over:
                self.deliver(self._on_its_way.popleft())

        network.send(connection.server, connection.caller, arrive)
