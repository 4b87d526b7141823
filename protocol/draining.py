"""Taking a worker out of service and putting it back while it runs: the face of it that every worker serves.

Owns whether a command holds; what it means to take no new work is its owner's. A process that is stopping drains anyway
and cannot be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from protocol.errors import NoWorker
from protocol.pb import worker_pb2, worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Drain:
    """Of one worker. `is_idle`: nothing is under way there."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self.is_draining = False
        self._is_idle = is_idle
        self._switch: Callable[[bool], None] | None = None  # while the worker serves

    @contextmanager
    def switched_by(self, switch: Callable[[bool], None]) -> Iterator[None]:
        """Commands count within the block."""
        self._switch = switch
        try:
            yield
        finally:
            self._switch = None

    def set(self, draining: bool) -> None:
        """Idempotent. Raises NoWorker while the worker starts or stops."""
        if self._switch is None:
            raise NoWorker("this worker is starting or stopping")
        if draining != self.is_draining:
            self.is_draining = draining
            self._switch(draining)

    def begin_end(self) -> None:
        """The process is to stop."""
        self.set(True)
        self._switch = None

    @property
    def is_idle(self) -> bool:
        return self._is_idle()


class DrainingServicer(worker_pb2_grpc.DrainingServicer):
    """Serves `Draining`."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def SetDraining(self, request: worker_pb2.SetDrainingRequest, context: Context) -> worker_pb2.DrainState:
        """Without a wish it tells how things are. Raises NoWorker while the worker starts or stops."""
        if request.HasField("draining"):
            self._drain.set(request.draining)
        return worker_pb2.DrainState(draining=self._drain.is_draining, idle=self._drain.is_idle)
