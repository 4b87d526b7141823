"""One life of one process: it is started, serves, drains and dies, and its books are proven after every event."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from protocol.errors import MoonserveError
from protocol.ids import Role
from protocol.request import Endpoint
from tests.simulation.calls import SimulatedChannels
from tests.simulation.loop import Life
from tests.simulation.network import Server
from tests.simulation.transfer import SimulatedTransfer

if TYPE_CHECKING:
    from tests.simulation.world import World

SELDOM = 16
DRAIN_S = 6.0


class Process:
    """One life of one process. Subclasses build themselves in `start`, in the event loop and in their life."""

    role: Role | None = None

    def __init__(self, world: World, life: Life, address: str) -> None:
        self.world = world
        self.life = life
        self.address = address
        self.channels = SimulatedChannels(world.network, life)
        self.server = Server(life)
        self.is_up = False
        self.is_draining = False

    @property
    def serves(self) -> bool:
        """Whether it is there for what is new."""
        return self.is_up and self.life.is_alive and not self.is_draining

    async def run(self) -> None:
        """Until it dies. Raises what ends it."""
        await self.start()
        self.world.network.servers[self.address] = self.server
        self.is_up = True
        await self.serve()

    async def start(self) -> None:
        raise NotImplementedError

    async def serve(self) -> None:
        raise NotImplementedError

    async def drain(self) -> None:
        """As after SIGTERM: returns when what is under way has ended, or has had its time."""

    def validate(self) -> None:
        """Raises AssertionError."""

    def unrest(self) -> str:
        """What it still holds though nobody wants anything of it; empty when all is well."""
        return ""

    def make_transfer(self) -> None:
        self.transfer: Any = SimulatedTransfer(self.world.network, self.life, self.world.engines)

    def endpoint(self) -> Endpoint:
        name, at = self.life.name, self.transfer.address
        return Endpoint(
            instance_id=name, epoch=self.life.epoch, rpc_address=self.address, transfer_address=at, host=name
        )

    def checked(self, state: Any, *, seldom: tuple[type, ...] = ()) -> Any:
        """Its `handle` proves the state's books after every event, and tells of whatever it raises. `seldom`: events
        after which it does so now and then."""
        handle: Callable[[Any, float], Any] = state.handle
        numbers = itertools.count()

        def handle_and_validate(event: Any, now: float) -> Any:
            try:
                done = handle(event, now)
                if not isinstance(event, seldom) or next(numbers) % SELDOM == 0:
                    state.validate()
            except MoonserveError:
                raise
            except Exception:
                about = f"{self.life!r} at {type(event).__name__}"
                self.world.problem(f"{about}: {traceback.format_exc(limit=-6)}")
                raise
            return done

        state.handle = handle_and_validate
        return state


async def until_one_fails(parts: Iterable[Coroutine[Any, Any, Any] | asyncio.Future[Any]]) -> None:
    """All of them; what has ended or was cancelled is not missed."""
    watched = [asyncio.ensure_future(part) for part in parts]
    while watched:
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            if not future.cancelled():
                future.result()
        watched = [future for future in watched if not future.done()]
    await asyncio.get_running_loop().create_future()  # it has drained and is about to end


async def until(idle: Coroutine[Any, Any, Any]) -> None:
    """Or until a drain has taken too long."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await idle
    except TimeoutError:
        return
