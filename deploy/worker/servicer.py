"""The gRPC face of role switching: a command in, what follows from it out."""

from __future__ import annotations

from typing import Any

import grpc.aio

from deploy.worker.turn import Turn
from protocol.errors import InvalidRequest
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.wire import role_from_wire, role_to_wire

Context = grpc.aio.ServicerContext[Any, Any]

_ROLES = (Role.PREFILL, Role.DECODE)


class RoleSwitchServicer(worker_pb2_grpc.RoleSwitchServicer):
    """Serves `RoleSwitch` during one turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    async def SwitchRole(
        self, request: worker_pb2.SwitchRoleRequest, context: Context
    ) -> worker_pb2.SwitchRoleReply:
        """Raises InvalidRequest, or Overloaded while it changes to the role that it is to leave again."""
        drain_s = request.drain_s if request.HasField("drain_s") else None
        if drain_s is not None and not 0 <= drain_s < float("inf"):
            raise InvalidRequest(f"drain_s is {drain_s}; it is finite and at least 0")
        self._turn.switch_to(_role(request), drain_s)
        return worker_pb2.SwitchRoleReply(
            role=role_to_wire(self._turn.role), switching=self._turn.is_switching
        )


def _role(request: worker_pb2.SwitchRoleRequest) -> Role:
    try:
        role = role_from_wire(request.role)
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"no such role: {request.role}") from error
    if role not in _ROLES:
        raise InvalidRequest(f"a worker has no role {role}", param="role")
    return role
