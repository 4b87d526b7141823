"""Where a worker's home store is, as the conductor knows. Asked again whenever somebody could not reach it, since a
restarted store has another endpoint. Does not know what is kept there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from protocol.conductors import Conductors
from protocol.errors import MoonserveError
from protocol.pb import conductor_pb2
from protocol.process import running
from protocol.request import Endpoint
from protocol.rpc import Channels
from protocol.wire import endpoint_from_wire

log = logging.getLogger(__name__)

# Bounds how often the conductor is asked while a store is down.
HOME_RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0


class HomeFinder:
    """Asks the conductor where the home store is, as often as `look` is called for."""

    def __init__(self, channels: Channels, conductor: str, home_store: str, found: Callable[[Endpoint], None]) -> None:
        self._conductors = Conductors(channels, conductor)
        self._home_store = home_store
        self._found = found
        self._wanted = asyncio.Event()
        self._wanted.set()

    def look(self) -> None:
        """The endpoint is not known, or was wrong."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            endpoint = await self._find()
            if endpoint is None:
                self._wanted.set()
            else:
                self._found(endpoint)
            await asyncio.sleep(HOME_RETRY_S)

    async def _find(self) -> Endpoint | None:
        try:
            view = await self._conductors.call(
                lambda conductor: conductor.GetCluster,
                conductor_pb2.GetClusterRequest(),
                timeout_s=CALL_TIMEOUT_S,
            )
        except MoonserveError as error:
            log.info("home store not found: %s", error)
            return None
        for instance in view.instances:
            if instance.endpoint.instance_id == self._home_store:
                return endpoint_from_wire(instance.endpoint)
        return None


@contextlib.asynccontextmanager
async def finding_home(finder: HomeFinder | None) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
    """Looks for the home store, if there is one, while the block lasts; gives the task that does."""
    if finder is None:
        yield ()
        return
    async with running(finder.run()) as task:
        yield (task,)
