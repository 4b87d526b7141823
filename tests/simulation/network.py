"""Simulated network between the lives of processes: addresses, latency, cuts, losses and broken connections.

Messages are never altered, as over TCP. Two messages may arrive in any order. Of calls, it knows only their
connections.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tests.simulation.loop import OUTSIDE, Life, VirtualLoop

KEEPALIVE_S = 15.0
"""Time until keepalive breaks a silent connection, with the options of `protocol.rpc.grpc_transport`."""
Deliver = Callable[[], None]


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, (), tuple(trailing), details=details)  # type: ignore[arg-type]


UNAVAILABLE, TOO_LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


@dataclass(slots=True, kw_only=True)
class Weather:
    """Current state of all links: probabilities per message, and seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    stalls: float = 0.0  # messages that take up to `stall_s`
    stall_s: float = 3.0
    corruption: float = 0.0  # transfers with a bit flip that no checksum of the wire detects
    engine_failures: float = 0.0  # per step


@dataclass(slots=True, eq=False)
class Connection:
    """One call or stream between two lives."""

    caller: Life
    server: Life
    break_off: Deliver
    is_lean: bool  # kept alive by the kernel even while a process is stopped; gRPC's pings need a running process
    silent_since: float | None = None
    task: asyncio.Task[Any] | None = None  # the handler
    is_over: bool = False

    def end_handler(self) -> None:
        if self.task is not None and self.server.is_alive:
            self.server.soon(self.task.cancel)


class Network:
    """Servers by address, cut links and messages in flight."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = Weather()
        self.servers: dict[str, Server] = {}  # by address
        self.unanswered: list[Callable[[Exception], None]] = []  # calls that never get an answer
        self._cuts: set[tuple[str, str]] = set()
        self._held: dict[tuple[str, str], list[Deliver]] = {}
        self._connections: dict[Connection, None] = {}
        self._sweep()

    # -- links

    def latency(self) -> float:
        """Draws a latency in seconds: up to `stall_s` for a stalled message, else about half a millisecond."""
        if self.rng.random() < self.weather.stalls:
            return self.rng.uniform(0.0, self.weather.stall_s)
        return self.rng.expovariate(2000)

    def cut(self, source: str, target: str) -> None:
        """Cuts a link in one direction. Its messages are held until the link heals."""
        self._cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self._cuts.discard((source, target))
        for deliver in self._held.pop((source, target), ()):
            self.loop.call_later(self.latency(), deliver, context=OUTSIDE)

    def heal_all(self) -> None:
        """Heals all links, and fails calls that would never get an answer."""
        for source, target in sorted(self._cuts):
            self.heal(source, target)
        for settle in self.unanswered:
            settle(rpc_error(UNAVAILABLE, "Connection timed out"))
        self.unanswered.clear()

    def is_cut(self, one: Life, other: Life) -> bool:
        """True if the link is cut in either direction."""
        return (one.name, other.name) in self._cuts or (other.name, one.name) in self._cuts

    def send(self, source: Life, target: Life, deliver: Deliver, after_s: float = 0.0) -> None:
        """Calls `deliver` when the message arrives at the target's host, outside of any process."""
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
        """Breaks all connections of a dead process, as its kernel does. A peer behind a cut link is notified later."""
        for connection in [c for c in self._connections if life in (c.caller, c.server)]:
            other = connection.server if connection.caller is life else connection.caller
            self.send(life, other, connection.break_off)

    def _sweep(self) -> None:
        """Simulates keepalive: once a second, breaks connections that have been silent for too long."""
        now = self.loop.time()
        for connection in list(self._connections):
            caller, server = connection.caller, connection.server
            is_heard = all(each.is_alive and (connection.is_lean or not each.is_stopped) for each in (caller, server))
            if is_heard and not self.is_cut(caller, server):
                connection.silent_since = None
            elif connection.silent_since is None:
                connection.silent_since = now
            elif now - connection.silent_since > KEEPALIVE_S:
                connection.break_off()
        self.loop.call_later(1.0, self._sweep, context=OUTSIDE)

    def server_at(self, address: str) -> "Server | None":
        server = self.servers.get(address)
        return server if server is not None and server.life.is_alive else None

    def loses(self) -> bool:
        return self.rng.random() < self.weather.loss


class Server:
    """The part of `grpc.aio.server` that generated code uses."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, services: Any) -> None:
        for service in services:
            self.handlers.update(service._method_handlers)


@dataclass(slots=True)
class Context:
    """The part of a servicer's context that servicers use."""

    loop: VirtualLoop
    ends_at: float | None = None
    failure: tuple[Any, str, Any] | None = None

    def time_remaining(self) -> float | None:
        return None if self.ends_at is None else self.ends_at - self.loop.time()

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.failure = (code, details, trailing_metadata)
        raise grpc.aio.AbortError

    def error(self) -> grpc.aio.AioRpcError:
        """Returns the error that the caller receives after `abort`."""
        assert self.failure is not None
        return rpc_error(*self.failure)
