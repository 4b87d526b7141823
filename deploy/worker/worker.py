"""Runs a worker that alternates between prefill and decode over one replica.

Rule: a turn begins after the previous turn has ended, when nothing writes to the pool's memory any more. The replica,
the transfer engine with its memory, and the pool's findable blocks outlive a turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

import grpc.aio

from decode_worker.worker import DecodeWorker
from deploy.worker.config import WorkerConfig
from engine.block_pool import BlockPool
from prefill_worker.worker import PrefillWorker
from protocol.errors import InvalidRequest, Overloaded
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.wire import role_from_wire, role_to_wire
from worker.process import Equipment, Worker, equipped

_RETRY_AFTER_S = 1.0


class Turn(Lifecycle):
    """Period in one role. `drain_s`: time for requests in flight to finish before another role begins."""

    def __init__(self, role: Role, process: Lifecycle, *, drain_s: float) -> None:
        super().__init__(status_fd=None)
        self.role = role
        self._process = process
        self._drain_s = drain_s
        self._wanted: Role | None = None  # set once a switch is requested

    @property
    def next_role(self) -> Role | None:
        """Role of the next turn. None = the process ends with this turn, as far as known."""
        return None if self._process.stopping.is_set() else self._wanted

    @property
    def is_switching(self) -> bool:
        return self._wanted is not None

    def switch_to(self, role: Role, drain_s: float | None = None) -> None:
        """Ends the turn so that `role` begins. Does nothing if the turn has that role already; raises Overloaded if it
        is then about to change to the other one."""
        if role is self.role:
            if self.is_switching:
                raise Overloaded(
                    f"this worker is changing from {self.role} to {self._wanted}",
                    retry_after_s=_RETRY_AFTER_S,
                )
            return
        if not self.is_switching:
            self._wanted = role
            self._drain_s = self._drain_s if drain_s is None else drain_s
            self.stopping.set()

    async def end_with_process(self) -> None:
        """Ends the turn when the process is stopped. Runs concurrently with the turn."""
        await self._process.stopping.wait()
        self.stopping.set()

    # Called by a role's code

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self._process.progress(stage, fraction)

    def ready(self, **facts: str) -> None:
        self._process.ready(role=self.role.value, **facts)

    async def drained(self, idle: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
        """Waits for `idle` for `drain_s`. If the process is stopped meanwhile, waits as the process's own `drained`."""
        async with running(idle) as finishing, running(self._process.stopping.wait()) as told:
            await asyncio.wait({finishing, told}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                await self._process.drained(asyncio.wait({finishing}), timeout_s)
            return finishing.done()


Context = grpc.aio.ServicerContext[Any, Any]

_ROLES = (Role.PREFILL, Role.DECODE)


class RoleSwitchServicer(worker_pb2_grpc.RoleSwitchServicer):
    """Serves `RoleSwitch` during one turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: Context) -> worker_pb2.SwitchRoleReply:
        """Starts a switch. Raises InvalidRequest, or Overloaded for the present role while a switch has begun."""
        drain_s = request.drain_s if request.HasField("drain_s") else None
        if drain_s is not None and not 0 <= drain_s < float("inf"):
            raise InvalidRequest(f"drain_s is {drain_s}; it is finite and at least 0")
        self._turn.switch_to(_role(request), drain_s)
        return worker_pb2.SwitchRoleReply(role=role_to_wire(self._turn.role), switching=self._turn.is_switching)


def _role(request: worker_pb2.SwitchRoleRequest) -> Role:
    try:
        role = role_from_wire(request.role)
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"no such role: {request.role}") from error
    if role not in _ROLES:
        raise InvalidRequest(f"a worker has no role {role}", param="role")
    return role


log = logging.getLogger(__name__)


class SwitchingWorker:
    """Successive turns over one replica."""

    def __init__(self, config: WorkerConfig, equipment: Equipment) -> None:
        self._config = config
        self._equipment = equipment
        self._pool: BlockPool | None = None  # of the latest turn

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until the process is stopped. Raises the error that ends a turn early."""
        role: Role | None = self._config.first_role
        while role is not None:
            role = await self._take_turn(role, lifecycle)

    async def _take_turn(self, role: Role, lifecycle: Lifecycle) -> Role | None:
        """Runs one turn and returns the next role; None if the process is to stop."""
        turn = Turn(role, lifecycle, drain_s=self._config.role_drain_s)
        servicer = RoleSwitchServicer(turn)
        worker = self._worker(role)
        async with running(turn.end_with_process()):
            await worker.run(turn, partial(worker_pb2_grpc.add_RoleSwitchServicer_to_server, servicer))
        self._pool = worker.pool
        if turn.next_role is not None:
            log.info("changing from %s to %s", role, turn.next_role)
        return turn.next_role

    def _worker(self, role: Role) -> Worker:
        if role is Role.DECODE:
            return DecodeWorker(self._config.as_decode(), self._equipment, earlier=self._pool)
        return PrefillWorker(self._config, self._equipment, earlier=self._pool)


async def serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    """Runs a worker of changing roles until the process is stopped. Raises ConfigError if it cannot start."""
    async with equipped(config, lifecycle, "worker", config.faults()) as equipment:
        await SwitchingWorker(config, equipment).run(lifecycle)
