"""Base class of simulated processes: start, serve, drain, and validation of the state after events."""

import asyncio
import itertools
import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.request import Endpoint, Role
from tests.simulation.calls import SimulatedChannels
from tests.simulation.loop import Life
from tests.simulation.network import Server
from tests.simulation.transfer import SimulatedTransfer

if TYPE_CHECKING:
    from tests.simulation.world import World

SELDOM = 16
DRAIN_S = 6.0


class Process:
    """One life of one process. Subclasses create their parts in `start`, which runs in the event loop and life."""

    role: Role | None = None

    def __init__(self, world: "World", life: Life, address: str) -> None:
        self.world = world
        self.life = life
        self.address = address
        self.channels = SimulatedChannels(world.network, life)
        self.server = Server(life)
        self.is_up = False
        self.is_draining = False

    @property
    def serves(self) -> bool:
        """True if the process accepts new work."""
        return self.is_up and self.life.is_alive and not self.is_draining

    async def run(self) -> None:
        """Starts and serves until the process dies. Raises the error that ends it."""
        await self.start()
        self.world.network.servers[self.address] = self.server
        self.is_up = True
        await self.serve()

    async def start(self) -> None:
        raise NotImplementedError

    async def serve(self) -> None:
        raise NotImplementedError

    async def drain(self) -> None:
        """Drains, as after SIGTERM. Returns when the work in flight has ended or has timed out."""

    def validate(self) -> None:
        """Raises AssertionError if the process's state is inconsistent."""

    def unrest(self) -> str:
        """Returns a description of the resources that an idle process still holds; empty if there are none."""
        return ""

    def make_transfer(self) -> None:
        self.transfer: Any = SimulatedTransfer(self.world.network, self.life, self.world.engines)

    def endpoint(self) -> Endpoint:
        name, at = self.life.name, self.transfer.address
        return Endpoint(
            instance_id=name, epoch=self.life.epoch, rpc_address=self.address, transfer_address=at, host=name
        )

    def checked(self, state: Any, *, seldom: tuple[type, ...] = ()) -> Any:
        """Wraps a state's `handle` to validate the state after every event and to report unexpected errors. After
        events of the types `seldom`, it validates only one time in SELDOM."""
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
    """Runs all parts until one raises. Parts that return or are cancelled do not end it."""
    watched = [asyncio.ensure_future(part) for part in parts]
    while watched:
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            if not future.cancelled():
                future.result()
        watched = [future for future in watched if not future.done()]
    await asyncio.get_running_loop().create_future()  # all parts have ended: the process has drained and ends soon


async def until(idle: Coroutine[Any, Any, Any]) -> None:
    """Awaits `idle`, for at most DRAIN_S."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await idle
    except TimeoutError:
        return
