"""A unary gRPC call over the simulated network: late, lost, doubled, or answered by a connection that then breaks."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from protocol.rpc import _guard_unary
from tests.simulation.loop import OUTSIDE, Life
from tests.simulation.network import TOO_LATE, UNAVAILABLE, Connection, Context, Network, Server, rpc_error

REDIAL_S = 0.2


class Call:
    """A unary call, from its begin to its answer."""

    def __init__(self, network: Network, caller: Life, address: str, path: str, data: bytes, timeout_s: float) -> None:
        self._network, self._loop = network, network.loop
        self._caller, self._address, self._path, self._data = caller, address, path, data
        self._ends_at = self._loop.time() + timeout_s
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self._connections: list[Connection] = []

    async def answer(self, wait_for_ready: bool) -> bytes:
        timer = self._loop.call_at(self._ends_at, self._settle, rpc_error(TOO_LATE, "Deadline Exceeded"))
        try:
            self._begin(wait_for_ready)
            return await self._answer
        finally:
            timer.cancel()
            for connection in self._connections:
                self._abandon(connection)

    def _settle(self, outcome: bytes | Exception) -> None:
        if self._answer.done():
            return
        if isinstance(outcome, Exception):
            self._answer.set_exception(outcome)
        else:
            self._answer.set_result(outcome)

    def _fail_later(self, details: str) -> None:
        error = rpc_error(UNAVAILABLE, details)
        self._loop.call_later(self._network.latency(), self._settle, error, context=OUTSIDE)

    def _begin(self, wait_for_ready: bool) -> None:
        network = self._network
        server = network.server_at(self._address)
        if server is None or network.is_cut(self._caller, server.life):
            if wait_for_ready:
                self._loop.call_later(REDIAL_S, self._retry)
                return
            if server is None:
                self._fail_later("Connection refused")
                return
            if network.rng.random() < 0.5:  # what has no connection yet gets none
                network.unanswered.append(self._settle)
                return
        if network.loses():
            how = network.rng.randrange(3)
            if how == 0:  # the connection breaks before it arrives
                self._fail_later("Connection reset by peer")
            elif how == 1:  # or before the answer does
                self._send(server, loses_answer=True)
            else:  # or nobody ever answers
                network.unanswered.append(self._settle)
            return
        self._send(server)
        if network.rng.random() < network.weather.duplication:
            self._send(server, after_s=network.rng.uniform(0.0, 2.0), is_copy=True)

    def _retry(self) -> None:
        if not self._answer.done():
            self._begin(True)

    def _send(self, server: Server, *, after_s: float = 0.0, loses_answer: bool = False, is_copy: bool = False) -> None:
        connection = Connection(self._caller, server.life, lambda: self._broken(connection))
        if not is_copy:
            self._network.opened(connection)
            self._connections.append(connection)

        def arrive() -> None:
            if not connection.is_over and server.life.is_alive:
                server.life.soon(self._serve, server, connection, loses_answer, is_copy)

        self._network.send(self._caller, server.life, arrive, after_s)

    def _serve(self, server: Server, connection: Connection, loses_answer: bool, is_copy: bool) -> None:
        """At the server."""
        if connection.is_over:
            return
        handling = self._handle(server, connection, loses_answer, is_copy)
        connection.task = server.life.spawn(handling)
        if not is_copy:
            self._loop.call_at(self._ends_at, connection.task.cancel)

    async def _handle(self, server: Server, connection: Connection, loses_answer: bool, is_copy: bool) -> None:
        handler = server.handlers[self._path]
        context = Context(self._loop, self._ends_at)
        outcome: bytes | Exception
        try:
            request = handler.request_deserializer(self._data)
            reply = await _guard_unary(handler.unary_unary, True, None)(request, context)
            outcome = handler.response_serializer(reply)
        except grpc.aio.AbortError:
            assert context.failure is not None
            outcome = rpc_error(*context.failure)
        if is_copy:
            return
        if loses_answer:
            outcome = rpc_error(UNAVAILABLE, "Connection reset by peer")

        def arrive() -> None:
            if not connection.is_over:
                self._network.closed(connection)
                self._settle(outcome)

        self._network.send(server.life, self._caller, arrive)

    def _broken(self, connection: Connection) -> None:
        """Both ends that live learn it."""
        if connection.is_over:
            return
        self._network.closed(connection)
        self._settle(rpc_error(UNAVAILABLE, "Socket closed"))
        if connection.task is not None:
            connection.server.soon(connection.task.cancel)

    def _abandon(self, connection: Connection) -> None:
        """The caller does not wait any more; the server hears of it."""
        if connection.is_over:
            return
        self._network.closed(connection)

        def cancel() -> None:
            if connection.task is not None and connection.server.is_alive:
                connection.server.soon(connection.task.cancel)

        self._network.send(connection.caller, connection.server, cancel)
