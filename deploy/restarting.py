"""A rolling restart: each process of a launcher gives way to a successor with the same options, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from deploy.plan import Kind
from deploy.supervisor import Supervisor
from protocol.conductors import Conductors
from protocol.errors import MoonserveError, NoWorker
from protocol.pb import conductor_pb2
from protocol.rpc import Channels

log = logging.getLogger(__name__)

# Stores first, since the caches of workers outlast them; then workers, whose requests go on elsewhere or wait;
# gateways, which overlap; conductors late, since a new leader knows nothing of requests that another one placed.
RESTART_ORDER = (
    *(Kind.STORE, Kind.PREFILL, Kind.DECODE),
    *(Kind.GATEWAY, Kind.CONDUCTOR, Kind.DIRECTORY),
)
BACK_WITHIN_S = 120.0  # from "ready" to the conductor's knowing it
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0


async def instances(conductors: Conductors, timeout_s: float = _CALL_TIMEOUT_S) -> list[conductor_pb2.InstanceView]:
    """The members of the cluster, of whichever conductor leads. Raises MoonserveError when none answers."""
    request = conductor_pb2.GetClusterRequest()
    view = await conductors.call(lambda stub: stub.GetCluster, request, timeout_s=timeout_s)
    return list(view.instances)


class RollingRestart:
    """The next process goes when the one before is back where requests find it, so that at most one is missing."""

    def __init__(self, supervisor: Supervisor, conductor_addresses: str, channels: Callable[[], Channels]) -> None:
        """`channels`: fresh ones to the conductors, for one restart."""
        self._supervisor = supervisor
        self._addresses = conductor_addresses
        self._channels = channels

    async def run(self) -> None:
        """Raises MoonserveError where a successor does not come up or is not found, or nobody says who is there, within
        `BACK_WITHIN_S`: those that come after it are left as they are."""
        channels = self._channels()
        try:
            conductors = Conductors(channels, self._addresses)
            order = sorted(self._supervisor.children, key=lambda child: RESTART_ORDER.index(child.spec.kind))
            for child in order:
                before = await _known(conductors)
                log.info("restarting %s", child.spec.instance_id)
                await self._supervisor.restart(child)
                await _until_back(conductors, child.spec.instance_id, before)
        finally:
            await channels.close()


async def _until_back(conductors: Conductors, instance_id: str, before: dict[str, int]) -> None:
    """Until every member of before is one again, and this one with a later epoch."""
    missing = set(before)
    try:
        async with asyncio.timeout(BACK_WITHIN_S):
            while missing:
                now = await _epochs(conductors)
                missing = before.keys() - now.keys()
                if now.get(instance_id, 0) == before.get(instance_id, -1):
                    missing.add(instance_id)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        names = ", ".join(sorted(missing))
        raise NoWorker(
            f"{instance_id} was restarted, and {names} did not join the cluster within {BACK_WITHIN_S:.0f} s"
        ) from None


async def _known(conductors: Conductors) -> dict[str, int]:
    """The members that must be there again before the next one goes. Without an answer, none would be waited for."""
    try:
        async with asyncio.timeout(BACK_WITHIN_S):
            while not (members := await _epochs(conductors)):  # noqa: ASYNC110 - it is elsewhere
                await asyncio.sleep(_POLL_S)
            return members
    except TimeoutError:
        raise NoWorker(f"no conductor said within {BACK_WITHIN_S:.0f} s who is in the cluster") from None


async def _epochs(conductors: Conductors) -> dict[str, int]:
    """Of the members that take requests, by instance id; empty while no conductor answers."""
    try:
        found = await instances(conductors)
    except MoonserveError as error:
        log.debug("no view of the cluster: %s", error)
        return {}
    return {each.endpoint.instance_id: each.endpoint.epoch for each in found if not each.draining}
