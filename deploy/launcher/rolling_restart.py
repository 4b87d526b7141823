"""Rolling restart: replaces each process of a launcher by a successor with the same options, one after the other."""

import asyncio
import logging
from collections.abc import Callable

from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.launcher.supervisor import Supervisor
from moonserve.protocol.errors import MoonserveError, NoWorker
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.rpc.grpc_transport import Channels

log = logging.getLogger(__name__)

# Stores first, because the caches of workers outlast them; then workers, whose requests continue elsewhere or wait;
# then gateways, which overlap. Conductors are late, because a new leader does not know the requests placed before
# it.
RESTART_ORDER = (
    *(ProcessKind.STORE, ProcessKind.PREFILL, ProcessKind.DECODE),
    *(ProcessKind.GATEWAY, ProcessKind.CONDUCTOR, ProcessKind.DIRECTORY),
)
REJOIN_TIMEOUT_S = 120.0  # from ready to registered with the conductor
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0


async def cluster_members(
    conductors: ConductorClient, timeout_s: float = _CALL_TIMEOUT_S
) -> list[conductor_pb2.InstanceView]:
    """Returns the members of the cluster from the leading conductor. Raises MoonserveError if none answers."""
    request = conductor_pb2.GetClusterRequest()
    view = await conductors.call(lambda stub: stub.GetCluster, request, timeout_s=timeout_s)
    return list(view.instances)


class RollingRestart:
    """Restart of all processes, one by one. Each waits until requests reach the one before: at most one is missing."""

    def __init__(self, supervisor: Supervisor, conductor_addresses: str, channels: Callable[[], Channels]) -> None:
        """`channels`: creates the channels to the conductors for one restart."""
        self._supervisor = supervisor
        self._addresses = conductor_addresses
        self._channels = channels

    async def run(self) -> None:
        """Restarts all processes. Raises MoonserveError if a successor fails, if the members are not back within
        `REJOIN_TIMEOUT_S`, or if no conductor lists them in that time. The remaining processes are then not
        restarted."""
        async with self._channels() as channels:
            conductors = ConductorClient(channels, self._addresses)
            order = sorted(self._supervisor.children, key=lambda child: RESTART_ORDER.index(child.spec.kind))
            for child in order:
                before = await _members_before(conductors)
                log.info("restarting %s", child.spec.instance_id)
                await self._supervisor.restart(child)
                await _wait_until_rejoined(conductors, child.spec.instance_id, before)


async def _wait_until_rejoined(conductors: ConductorClient, instance_id: str, before: dict[str, int]) -> None:
    """Waits until every member of `before` is back and this one has another epoch. Raises NoWorker on timeout."""
    missing = set(before)
    try:
        async with asyncio.timeout(REJOIN_TIMEOUT_S):
            while missing:
                now = await _epochs(conductors)
                missing = before.keys() - now.keys()
                if now.get(instance_id, 0) == before.get(instance_id, -1):
                    missing.add(instance_id)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        names = ", ".join(sorted(missing))
        raise NoWorker(
            f"{instance_id} was restarted, and {names} did not join the cluster within {REJOIN_TIMEOUT_S:.0f} s"
        ) from None


async def _members_before(conductors: ConductorClient) -> dict[str, int]:
    """Returns the members that must be back after a restart. Retries an empty answer. Raises NoWorker on timeout."""
    try:
        async with asyncio.timeout(REJOIN_TIMEOUT_S):
            while not (members := await _epochs(conductors)):  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(_POLL_S)
            return members
    except TimeoutError:
        raise NoWorker(f"no conductor listed the members of the cluster within {REJOIN_TIMEOUT_S:.0f} s") from None


async def _epochs(conductors: ConductorClient) -> dict[str, int]:
    """Returns the epochs of all members that accept requests, by instance id; empty if no conductor answers."""
    try:
        found = await cluster_members(conductors)
    except MoonserveError as error:
        log.debug("no view of the cluster: %s", error)
        return {}
    return {each.endpoint.instance_id: each.endpoint.epoch for each in found if not each.draining}
