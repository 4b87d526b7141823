"""Draining of a running worker: takes it out of service and puts it back.

This module owns the draining flag and its service. The worker decides how to refuse new work. A process that is
stopping drains in any case and cannot be put back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moonserve.protocol.errors import NoWorker
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Context


class Drain:
    """Draining state of one worker. `is_idle` returns true if no request is in flight there."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self.is_draining = False
        self._is_idle = is_idle
        self._switch: Callable[[bool], None] | None = None  # while the worker serves

    @contextmanager
    def commands_enabled(self, switch: Callable[[bool], None]) -> Iterator[None]:
        """Accepts commands within the block and passes each change to `switch`."""
        self._switch = switch
        try:
            yield
        finally:
            self._switch = None

    def set(self, draining: bool) -> None:
        """Starts or ends draining; idempotent. Raises NoWorker while the worker starts or stops."""
        if self._switch is None:
            raise NoWorker("this worker is starting or stopping")
        if draining != self.is_draining:
            self.is_draining = draining
            self._switch(draining)

    def start_shutdown(self) -> None:
        """Starts the final draining of a process that stops; later commands are refused."""
        self.set(True)
        self._switch = None

    @property
    def is_idle(self) -> bool:
        return self._is_idle()


class DrainingServicer(worker_pb2_grpc.DrainingServicer):
    """gRPC service `Draining`."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def SetDraining(self, request: worker_pb2.SetDrainingRequest, context: Context) -> worker_pb2.DrainState:
        """Sets the state if the request has one, and returns the state. Raises NoWorker as `Drain.set` does."""
        if request.HasField("draining"):
            self._drain.set(request.draining)
        return worker_pb2.DrainState(draining=self._drain.is_draining, idle=self._drain.is_idle)
