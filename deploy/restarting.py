"""A rolling restart: every process of a launcher gives way to a successor with the same options, one after the other.

Rule: the next one goes when the one before is back where requests find it, so that at most one is missing at a time.
Stores first, since the caches of workers outlast them; then workers, whose requests go on elsewhere or wait; gateways,
which overlap; conductors last, which nothing is in the way of. Does not know what the processes are started with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from deploy.supervisor import Child, Supervisor
from protocol.conductors import Conductors
from protocol.errors import MoonserveError, NoWorker
from protocol.pb import conductor_pb2
from protocol.rpc import Channels

log = logging.getLogger(__name__)

BACK_WITHIN_S = 120.0  # from "ready" to the conductor's knowing it
_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0

_ORDER = ("kvstore", "prefill_worker", "decode_worker", "deploy", "gateway", "conductor")


class RollingRestart:
    """Of one launcher's processes, whose conductors are at `conductor_addresses`."""

    def __init__(
        self,
        supervisor: Supervisor,
        conductor_addresses: str,
        channels: Callable[[], Channels],
    ) -> None:
        """`channels`: fresh ones to them, for one restart."""
        self._supervisor = supervisor
        self._addresses = conductor_addresses
        self._channels = channels

    async def run(self) -> None:
        """Raises MoonserveError where a successor does not come up or is not found, or nobody says who is there, within
        `BACK_WITHIN_S`: those that come after it are left as they are."""
        channels = self._channels()
        try:
            conductors = Conductors(channels, self._addresses)
            for child in in_order(self._supervisor.children):
                members = await _known(conductors)
                log.info("restarting %s", child.spec.instance_id)
                await self._supervisor.restart(child)
                await self._until_back(conductors, child.spec.instance_id, members)
        finally:
            await channels.close()

    async def _until_back(
        self, conductors: Conductors, instance_id: str, before: dict[str, int]
    ) -> None:
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


def in_order(children: Sequence[Child]) -> list[Child]:
    """As they are to be restarted."""

    def rank(child: Child) -> int:
        module = child.spec.module
        return next(i for i, name in enumerate(_ORDER) if module.split(".")[0] == name)

    return sorted(children, key=rank)


async def _known(conductors: Conductors) -> dict[str, int]:
    """Who must be there again before the next one goes: without an answer, nobody would be waited for."""
    try:
        async with asyncio.timeout(BACK_WITHIN_S):
            while not (members := await _epochs(conductors)):  # noqa: ASYNC110 - it is elsewhere
                await asyncio.sleep(_POLL_S)
            return members
    except TimeoutError:
        raise NoWorker(
            f"no conductor said within {BACK_WITHIN_S:.0f} s who is in the cluster"
        ) from None


async def _epochs(conductors: Conductors) -> dict[str, int]:
    """Of the members that take requests, by instance id; empty while no conductor answers."""
    try:
        view = await conductors.call(
            lambda conductor: conductor.GetCluster,
            conductor_pb2.GetClusterRequest(),
            timeout_s=_CALL_TIMEOUT_S,
        )
    except MoonserveError as error:
        log.debug("no view of the cluster: %s", error)
        return {}
    return {
        instance.endpoint.instance_id: instance.endpoint.epoch
        for instance in view.instances
        if not instance.draining
    }
