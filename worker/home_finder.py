"""Finds the endpoint of a worker's home store through the conductor. Looks again whenever the store could not be
reached, since a restarted store has another endpoint. Does not know what is stored there."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import endpoint_from_wire

log = logging.getLogger(__name__)

# Limits the calls to the conductor while a store is down.
HOME_RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0


class HomeFinder:
    """Looks up the home store at the conductor, at the start and after each `look`. Calls `found` with the endpoint."""

    def __init__(self, channels: Channels, conductor: str, home_store: str, found: Callable[[Endpoint], None]) -> None:
        self._conductors = ConductorClient(channels, conductor)
        self._home_store = home_store
        self._found = found
        self._wanted = asyncio.Event()
        self._wanted.set()

    def look(self) -> None:
        """Requests a new lookup, since the endpoint is unknown or wrong."""
        self._wanted.set()

    async def run(self) -> None:
        """Serves lookups until cancelled."""
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
    """Runs the finder, if there is one, within the `async with` block. Yields its task."""
    if finder is None:
        yield ()
        return
    async with background_task(finder.run()) as task:
        yield (task,)
