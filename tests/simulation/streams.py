"""A server's gRPC stream over the simulated network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protocol.rpc import _guard_stream
from tests.simulation.loop import OUTSIDE, Life
from tests.simulation.network import UNAVAILABLE, Connection, Context, Network, Server, rpc_error


@dataclass(eq=False)
class Stream:
    """A server's stream at its caller. Its messages keep their order; what is on its way when it breaks is lost."""

    network: Network
    caller: Life
    address: str
    path: str
    data: bytes
    deserialize: Callable[[bytes], Any]
    _arrived: deque[bytes | Exception] = field(default_factory=deque)
    _waiting: asyncio.Event = field(default_factory=asyncio.Event)
    _connection: Connection | None = None
    _on_its_way: deque[bytes | Exception] = field(default_factory=deque)

    async def __aiter__(self) -> AsyncIterator[Any]:
        self._begin()
        while True:
            while self._arrived:
                item = self._arrived.popleft()
                if isinstance(item, Exception):
                    raise item
                yield self.deserialize(item)
            self._waiting.clear()
            await self._waiting.wait()

    def cancel(self) -> None:
        connection = self._connection
        if connection is not None and not connection.is_over:
            self.network.closed(connection)
            self.network.send(self.caller, connection.server, lambda: self._end_handler(connection))

    def _begin(self) -> None:
        network = self.network
        server = network.server_at(self.address)
        if server is None or network.loses():
            error = rpc_error(UNAVAILABLE, "Connection refused")
            network.loop.call_later(network.latency(), self._put, error, context=OUTSIDE)
            return
        connection = Connection(self.caller, server.life, lambda: self._broken(connection))
        self._connection = connection
        network.opened(connection)

        def arrive() -> None:
            if not connection.is_over and server.life.is_alive:
                server.life.soon(self._serve, server, connection)

        network.send(self.caller, server.life, arrive)

    def _serve(self, server: Server, connection: Connection) -> None:
        if not connection.is_over:
            connection.task = server.life.spawn(self._handle(server, connection))

    async def _handle(self, server: Server, connection: Connection) -> None:
        handler = server.handlers[self.path]
        context = Context(self.network.loop)
        ended: Exception = rpc_error(UNAVAILABLE, "the stream ended")
        try:
            request = handler.request_deserializer(self.data)
            async for message in _guard_stream(handler.unary_stream, True)(request, context):
                self._push(connection, handler.response_serializer(message))
        except grpc.aio.AbortError:
            assert context.failure is not None
            ended = rpc_error(*context.failure)
        self._push(connection, ended)

    def _push(self, connection: Connection, item: bytes | Exception) -> None:
        """At the server: the message leaves; it may also be the moment at which the connection breaks."""
        network = self.network
        if network.loses():
            network.send(connection.server, connection.caller, connection.break_off)
            return
        self._on_its_way.append(item)

        def arrive() -> None:
            """Of what is on its way the first."""
            if not connection.is_over:
                self._put(self._on_its_way.popleft())

        network.send(connection.server, connection.caller, arrive)

    def _put(self, item: bytes | Exception) -> None:
        self._arrived.append(item)
        self._waiting.set()

    def _broken(self, connection: Connection) -> None:
        if connection.is_over:
            return
        self.network.closed(connection)
        self._put(rpc_error(UNAVAILABLE, "Socket closed"))
        self._end_handler(connection)

    def _end_handler(self, connection: Connection) -> None:
        if connection.task is not None and connection.server.is_alive:
            connection.server.soon(connection.task.cancel)
