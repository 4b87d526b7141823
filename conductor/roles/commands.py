"""Telling workers to change their role: best effort, since the controller asks again while it is needed.

Each call is a held task. Knows nothing of why.
"""

from __future__ import annotations

import logging

from conductor.events import RoleChangeDue
from protocol.errors import MoonserveError
from protocol.held_tasks import HeldTasks
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels
from protocol.wire import role_to_wire

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class RoleCommands:
    """Used in one event loop. `channels` are its own, and closed with it."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._tasks = HeldTasks()

    def send(self, change: RoleChangeDue) -> None:
        """Does not wait."""
        self._tasks.start(self._send(change))

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._channels.close()

    async def _send(self, change: RoleChangeDue) -> None:
        address = change.endpoint.rpc_address
        stub = worker_pb2_grpc.RoleSwitchStub(self._channels.to(address))
        request = worker_pb2.SwitchRoleRequest(role=role_to_wire(change.role))
        try:
            await self._channels.call(stub.SwitchRole, request, timeout_s=_TIMEOUT_S)
        except MoonserveError as error:
            log.warning(
                "%s does not become a %s worker: %s",
                change.endpoint.instance_id,
                change.role,
                error,
            )
        finally:
            await self._channels.forget(address)  # it will have another one
