"""Links between the lives of processes, and gRPC over them: calls and streams that are late, cut, lost or doubled.

The product's generated stubs and servicers talk through it, in bytes. It fails as gRPC does: a refused or broken
connection is UNAVAILABLE, silence ends at the call's deadline or, where a link stays cut or a peer stopped, by
keepalive; a server learns of a caller that went away and cancels its handler. A message is never altered: that is
TCP's business. Between two calls there is no order.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protocol.rpc import Channels, _guard_stream, _guard_unary
from tests.simulation.loop import OUTSIDE, Life, VirtualLoop

KEEPALIVE_S = 15.0
"""What `protocol.rpc`'s options add up to."""
REDIAL_S = 0.2
Deliver = Callable[[], None]


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, (), tuple(trailing), details=details)  # type: ignore[arg-type]


UNAVAILABLE, TOO_LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


@dataclass(slots=True, kw_only=True)
class Weather:
    """How links are now: probabilities per message, and seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    stalls: float = 0.0  # of messages that take up to `stall_s`
    stall_s: float = 3.0
    corruption: float = 0.0  # of a transfer's bytes, where no checksum of the wire sees it
    engine_failures: float = 0.0  # of steps


@dataclass(slots=True, eq=False)
class Connection:
    """One call or stream between two lives."""

    caller: Life
    server: Life
    break_off: Deliver
    silent_since: float | None = None
    task: asyncio.Task[Any] | None = None  # the handler's
    is_over: bool = False


class Network:
    """Who listens where, which links are cut, and what is on its way."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = Weather()
        self.servers: dict[str, Server] = {}  # by address
        self.unanswered: list[Callable[[Exception], None]] = []  # calls
        self._cuts: set[tuple[str, str]] = set()
        self._held: dict[tuple[str, str], list[Deliver]] = {}
        self._connections: dict[Connection, None] = {}
        self._sweep()

    # -- links

    def latency(self) -> float:
        """Mostly a fraction of a millisecond."""
        if self.rng.random() < self.weather.stalls:
            return self.rng.uniform(0.0, self.weather.stall_s)
        return self.rng.expovariate(2000)

    def cut(self, source: str, target: str) -> None:
        """Nothing arrives in this direction until it heals; then what is still wanted does."""
        self._cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self._cuts.discard((source, target))
        for deliver in self._held.pop((source, target), ()):
            self.loop.call_later(self.latency(), deliver, context=OUTSIDE)

    def heal_all(self) -> None:
        """What would wait for an answer in vain learns it."""
        for source, target in sorted(self._cuts):
            self.heal(source, target)
        for settle in self.unanswered:
            settle(rpc_error(UNAVAILABLE, "Connection timed out"))
        self.unanswered.clear()

    def is_cut(self, one: Life, other: Life) -> bool:
        """In either direction: what needs answers has none."""
        return (one.name, other.name) in self._cuts or (other.name, one.name) in self._cuts

    def send(self, source: Life, target: Life, deliver: Deliver, after_s: float = 0.0) -> None:
        """`deliver` happens outside of any process, when the message has come to the target's host."""
        link = (source.name, target.name)

        def arrive() -> None:
            if link in self._cuts:
                self._held.setdefault(link, []).append(deliver)
            else:
                deliver()

        self.loop.call_later(after_s + self.latency(), arrive, context=OUTSIDE)

    # -- connections

    def opened(self, connection: Connection) -> None:
        self._connections[connection] = None

    def closed(self, connection: Connection) -> None:
        connection.is_over = True
        self._connections.pop(connection, None)

    def died(self, life: Life) -> None:
        """Its kernel ends its connections: the others hear of it, unless the link is cut."""
        for connection in [c for c in self._connections if life in (c.caller, c.server)]:
            other = connection.server if connection.caller is life else connection.caller
            self.send(life, other, connection.break_off)

    def _sweep(self) -> None:
        """Keepalive, of all at once."""
        now = self.loop.time()
        for connection in list(self._connections):
            caller, server = connection.caller, connection.server
            is_silent = (
                self.is_cut(caller, server)
                or caller.is_stopped
                or server.is_stopped
                or not (caller.is_alive and server.is_alive)
            )
            if not is_silent:
                connection.silent_since = None
            elif connection.silent_since is None:
                connection.silent_since = now
            elif now - connection.silent_since > KEEPALIVE_S:
                connection.break_off()
        self.loop.call_later(1.0, self._sweep, context=OUTSIDE)

    def server_at(self, address: str) -> Server | None:
        server = self.servers.get(address)
        return server if server is not None and server.life.is_alive else None

    def loses(self) -> bool:
        return self.rng.random() < self.weather.loss


class Server:
    """What `grpc.aio.server` is to the generated code."""

    def __init__(self, network: Network, life: Life) -> None:
        self.network = network
        self.life = life
        self.handlers: dict[str, Any] = {}

    def listen(self, address: str) -> None:
        self.network.servers[address] = self

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same as below, for older gRPC."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": each for name, each in handlers.items()})


@dataclass(slots=True)
class Context:
    """A servicer's."""

    loop: VirtualLoop
    ends_at: float | None = None
    failure: tuple[Any, str, Any] | None = None

    def time_remaining(self) -> float | None:
        return None if self.ends_at is None else self.ends_at - self.loop.time()

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.failure = (code, details, trailing_metadata)
        raise grpc.aio.AbortError


class SimulatedChannels(Channels):
    """The product's, over a simulated network."""

    def __init__(self, network: Network, life: Life) -> None:
        super().__init__("token")
        self._network = network
        self._life = life

    def _open(self, address: str) -> Any:
        return _Channel(self._network, self._life, address)


class _Channel:
    """What generated stubs need of one."""

    def __init__(self, network: Network, life: Life, address: str) -> None:
        self._network, self._life, self._address = network, life, address

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        async def call(
            request: Any, *, timeout: float, metadata: Any = (), wait_for_ready: bool = False
        ) -> Any:
            asked = _Call(
                self._network, self._life, self._address, path, request_serializer(request), timeout
            )
            return response_deserializer(await asked.answer(wait_for_ready))

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        def call(request: Any, *, metadata: Any = ()) -> _Stream:
            data = request_serializer(request)
            return _Stream(
                self._network, self._life, self._address, path, data, response_deserializer
            )

        return call

    async def close(self, grace: float | None = None) -> None:
        """Calls end by themselves here."""


class _Call:
    """A unary call, from its begin to its answer."""

    def __init__(
        self, network: Network, caller: Life, address: str, path: str, data: bytes, timeout_s: float
    ) -> None:
        self._network, self._loop = network, network.loop
        self._caller, self._address, self._path, self._data = caller, address, path, data
        self._ends_at = self._loop.time() + timeout_s
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self._connections: list[Connection] = []

    async def answer(self, wait_for_ready: bool) -> bytes:
        timer = self._loop.call_at(
            self._ends_at, self._settle, rpc_error(TOO_LATE, "Deadline Exceeded")
        )
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

    def _send(
        self,
        server: Server,
        *,
        after_s: float = 0.0,
        loses_answer: bool = False,
        is_copy: bool = False,
    ) -> None:
        connection = Connection(self._caller, server.life, lambda: self._broken(connection))
        if not is_copy:
            self._network.opened(connection)
            self._connections.append(connection)

        def arrive() -> None:
            if not connection.is_over and server.life.is_alive:
                server.life.soon(self._serve, server, connection, loses_answer, is_copy)

        self._network.send(self._caller, server.life, arrive, after_s)

    def _serve(
        self, server: Server, connection: Connection, loses_answer: bool, is_copy: bool
    ) -> None:
        """At the server."""
        if connection.is_over:
            return
        handling = self._handle(server, connection, loses_answer, is_copy)
        connection.task = server.life.spawn(handling)
        if not is_copy:
            self._loop.call_at(self._ends_at, connection.task.cancel)

    async def _handle(
        self, server: Server, connection: Connection, loses_answer: bool, is_copy: bool
    ) -> None:
        handler = server.handlers[self._path]
        context = Context(self._loop, self._ends_at)
        outcome: bytes | Exception
        try:
            request = handler.request_deserializer(self._data)
            reply = await _guard_unary(handler.unary_unary, True)(request, context)
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


@dataclass(eq=False)
class _Stream:
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
