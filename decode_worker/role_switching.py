"""Runs a worker that alternates between prefill and decode over one replica.

A period in one role begins after the previous one has ended, when nothing writes to the pool's memory any more. The
replica, the transfer engine with its memory, and the pool's findable blocks outlive a period.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from moonserve.decode_worker.config import AllotmentConfig, DecodeConfig
from moonserve.decode_worker.worker import DecodeWorker
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.worker import PrefillWorker
from moonserve.protocol.errors import ConfigError, InvalidRequest, Overloaded
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.config import option
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.grpc_transport import Context
from moonserve.protocol.rpc.wire import role_from_wire, role_to_wire
from moonserve.worker.process import Worker, WorkerResources, worker_resources

log = logging.getLogger(__name__)

# Longer than most answers take, shorter than the time in which load changes.
DEFAULT_ROLE_DRAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RoleSwitchingConfig(PrefillConfig, AllotmentConfig):
    """Options of `moonserve worker --role-switching on`: those of a prefill worker, and those that only a decode worker
    has."""

    role: str = option(help="role at the start", choices=("prefill", "decode"))
    role_drain_s: float = option(
        DEFAULT_ROLE_DRAIN_S,
        help="seconds that requests get to finish before a change of role; other workers continue the rest",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.as_decode()  # reports errors before anything is loaded
        if self.role_drain_s < 0:
            raise ConfigError("--role-drain-s must not be negative")

    @property
    def can_switch_role(self) -> bool:
        return True

    def as_decode(self) -> DecodeConfig:
        """Returns the options of its decode role. Raises ConfigError if it could not decode with them."""
        return DecodeConfig(**{each.name: getattr(self, each.name) for each in fields(DecodeConfig)})


_RETRY_AFTER_S = 1.0


class RolePeriod(Lifecycle):
    """Period in one role. `drain_s`: time for requests in flight to finish before another role begins."""

    def __init__(self, role: Role, process: Lifecycle, *, drain_s: float) -> None:
        super().__init__(status_fd=None)
        self.role = role
        self._process = process
        self._drain_s = drain_s
        self._wanted: Role | None = None  # set once a switch is requested

    @property
    def next_role(self) -> Role | None:
        """Role of the next period. None = the process ends with this one, as far as known."""
        return None if self._process.stopping.is_set() else self._wanted

    @property
    def is_switching(self) -> bool:
        return self._wanted is not None

    def switch_to(self, role: Role, drain_s: float | None = None) -> None:
        """Ends the period so that `role` begins. Does nothing if it has that role already; raises Overloaded if it
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
        """Ends the period when the process is stopped. Runs concurrently with it."""
        await self._process.stopping.wait()
        self.stopping.set()

    # Called by a role's code

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self._process.progress(stage, fraction)

    def ready(self, **facts: str) -> None:
        self._process.ready(role=self.role.value, **facts)

    async def wait_until_drained(self, idle: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
        """Waits for `idle` for `drain_s`. If the process is stopped meanwhile, waits as the process's own
        `wait_until_drained`."""
        async with background_task(idle) as finishing, background_task(self._process.stopping.wait()) as stopping:
            await asyncio.wait({finishing, stopping}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._process.wait_until_drained(asyncio.wait({finishing}), timeout_s)
            return finishing.done()


_ROLES = (Role.PREFILL, Role.DECODE)


class RoleSwitchServicer(worker_pb2_grpc.RoleSwitchServicer):
    """Serves `RoleSwitch` during one period."""

    def __init__(self, period: RolePeriod) -> None:
        self._period = period

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: Context) -> worker_pb2.SwitchRoleReply:
        """Starts a switch. Raises InvalidRequest, or Overloaded for the present role while a switch has begun."""
        drain_s = request.drain_s if request.HasField("drain_s") else None
        if drain_s is not None and not 0 <= drain_s < float("inf"):
            raise InvalidRequest(f"drain_s is {drain_s}; it must be finite and at least 0")
        self._period.switch_to(_role(request), drain_s)
        return worker_pb2.SwitchRoleReply(role=role_to_wire(self._period.role), switching=self._period.is_switching)


def _role(request: worker_pb2.SwitchRoleRequest) -> Role:
    try:
        role = role_from_wire(request.role)
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"no such role: {request.role}") from error
    if role not in _ROLES:
        raise InvalidRequest(f"a worker has no role {role}", param="role")
    return role


class RoleSwitchingWorker:
    """Successive periods over one replica."""

    def __init__(self, config: RoleSwitchingConfig, equipment: WorkerResources) -> None:
        self._config = config
        self._equipment = equipment
        self._pool: BlockPool | None = None  # of the latest period

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until the process is stopped. Raises the error that ends a period early."""
        role: Role | None = Role(self._config.role)
        while role is not None:
            role = await self._run_role_period(role, lifecycle)

    async def _run_role_period(self, role: Role, lifecycle: Lifecycle) -> Role | None:
        """Runs one period and returns the next role; None if the process is to stop."""
        period = RolePeriod(role, lifecycle, drain_s=self._config.role_drain_s)
        servicer = RoleSwitchServicer(period)
        worker = self._worker(role)
        async with background_task(period.end_with_process()):
            await worker.run(period, partial(worker_pb2_grpc.add_RoleSwitchServicer_to_server, servicer))
        self._pool = worker.pool
        if period.next_role is not None:
            log.info("changing from %s to %s", role, period.next_role)
        return period.next_role

    def _worker(self, role: Role) -> Worker:
        if role is Role.DECODE:
            return DecodeWorker(self._config.as_decode(), self._equipment, earlier=self._pool)
        return PrefillWorker(self._config, self._equipment, earlier=self._pool)


async def serve(config: RoleSwitchingConfig, lifecycle: Lifecycle) -> None:
    """Runs a worker of changing roles until the process is stopped. Raises ConfigError if it cannot start."""
    async with worker_resources(config, lifecycle, "worker", config.faults()) as equipment:
        await RoleSwitchingWorker(config, equipment).run(lifecycle)
