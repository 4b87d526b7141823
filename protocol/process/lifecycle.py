"""Life cycle of every long-lived process: start, progress, readiness, signals and end.

A process reports its progress to its starter on the status pipe (`--status-fd`, `protocol.process.child_process`). It
ends on SIGTERM or SIGINT, and when its parent dies, so that no orphan survives a killed launcher. SIGUSR1 ends it once
all requests in flight have ended, without a time limit.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process import child_process, logs
from moonserve.protocol.process.config import EXIT_CONFIG, option, run_command
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.tls import TlsConfig

log = logging.getLogger(__name__)

C = TypeVar("C", bound="ProcessConfig")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig(TlsConfig):
    """Options of every long-lived process; the base class of each service's configuration."""

    instance_id: str = option(help="name of this process in the cluster, stable across restarts")
    host: str = option("127.0.0.1", help="address to listen on, which is also published to the cluster")
    port: int = option(0, help="port to listen on; 0 lets the system choose")
    conductor: str | None = option(None, help="host:port of the conductor; several are separated by commas")
    cluster_token: str = option("", help="shared secret of the cluster's processes", secret=True)
    log_format: str = option("human", help="format of log lines", choices=("human", "json"))
    log_level: str = option("info", help="least severe level to log", choices=("debug", "info", "warning", "error"))
    status_fd: int | None = option(None, help="file descriptor for progress reports, set by serve")
    parent_pid: int | None = option(None, help="pid of the process at whose end this one ends, set by serve")


class Lifecycle:
    """Reports and stop requests of one process, passed to its service."""

    def __init__(self, status_fd: int | None, on_ready: "Callable[[Lifecycle], None]" = lambda _: None) -> None:
        self.stopping = asyncio.Event()
        self._is_unlimited = False  # while stopping: requests in flight have no time limit
        self._stop_now = asyncio.Event()
        self._status_fd = status_fd
        self._on_ready = on_ready

    def progress(self, stage: str, fraction: float | None = None) -> None:
        """Reports the current stage of the start, of which `fraction` is done."""
        self._report(child_process.StartProgress(stage, fraction))

    def ready(self, **facts: str) -> None:
        """Reports that the process serves, with `facts` for the starter, such as addresses."""
        self._on_ready(self)
        log.info("ready %s", " ".join(f"{name}={value}" for name, value in facts.items()))
        self._report(child_process.StartReady(facts))

    def failed(self, message: str) -> None:
        """Reports why the process cannot start."""
        self._report(child_process.StartFailed(message))

    def stop(self) -> None:
        """Requests the end of the process. Requests in flight get a limited time."""
        self._stop_now.set()
        self.stopping.set()

    def stop_when_idle(self) -> None:
        """Requests the end of the process when the requests in flight end, or when `stop` is called."""
        self._is_unlimited |= not self.stopping.is_set()  # a second call keeps it, one after `stop` does not set it
        self.stopping.set()

    async def wait_for_stop(self, *watched: asyncio.Future[Any]) -> None:
        """Waits for a stop request or the end of one of the `watched` futures, whose error it raises."""
        async with background_task(self.stopping.wait()) as stop_request:
            futures: set[asyncio.Future[Any]] = {stop_request, *watched}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            for future in watched:
                if future.done():
                    future.result()

    async def wait_until_drained(self, idle: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
        """Waits, after `wait_for_stop`, until `idle` ends and returns true, or false if its time is over.

        The time is `timeout_s`; after `stop_when_idle` it only starts with a call of `stop`."""
        async with background_task(idle) as finishing, background_task(self._stop_now.wait()) as stopped:
            if self._is_unlimited:
                await asyncio.wait({finishing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({finishing}, timeout=timeout_s)
            return finishing.done()

    def _report(self, report: child_process.StartReport) -> None:
        if self._status_fd is None:
            return
        # A full or broken pipe of a vanished starter must not end the process.
        with contextlib.suppress(OSError):
            child_process.write_report(self._status_fd, report)


def main(
    cls: type[C],
    service: Callable[[C, Lifecycle], Awaitable[None]],
    argv: Sequence[str] | None,
    *,
    prog: str,
) -> int:
    """Runs a service from its `__main__.py`, configured by flags, environment and TOML; returns the exit code."""

    def serve(config: C) -> int:
        return run(config, lambda lifecycle: service(config, lifecycle))

    return run_command(cls, serve, sys.argv[1:] if argv is None else argv, prog=prog)


def run(config: ProcessConfig, service: Callable[[Lifecycle], Awaitable[None]]) -> int:
    """Runs `service` in an event loop until it returns, and returns the exit code.

    The loop is uvloop's, in which a call between processes takes a tenth to a third less time than in asyncio's own.
    A ConfigError prints one line and gives exit code 2; any other error logs a traceback and gives 1.
    """
    logs.configure(config.instance_id, log_format=config.log_format, level=config.log_level)
    die_with_parent(config.parent_pid)
    lifecycle = Lifecycle(config.status_fd, on_ready=_enable_orderly_end)
    # Before it is ready, a process has no state to clean up, and steps such as importing torch block for seconds. So
    # the kernel ends it at once.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # Imported objects stay alive. Collections among them take a tenth to a third of the time of torch's import, and
    # streams may wait for this process.
    gc.disable()
    try:
        uvloop.run(_await(service(lifecycle)))
    except ConfigError as error:
        lifecycle.failed(str(error))
        sys.stderr.write(f"{config.instance_id}: {error}\n")
        return EXIT_CONFIG
    except Exception as error:  # process boundary: no caller can handle it
        lifecycle.failed(f"{type(error).__name__}: {error}")
        log.exception("process failed")
        return 1
    finally:
        gc.enable()
    return 0


async def _await(service: Awaitable[None]) -> None:
    await service


def _enable_orderly_end(lifecycle: Lifecycle) -> None:
    """Installs signal handlers for an orderly end and enables garbage collection."""
    gc.enable()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, lifecycle.stop)
    loop.add_signal_handler(signal.SIGUSR1, lifecycle.stop_when_idle)


def die_with_parent(parent_pid: int | None) -> None:
    """Requests a SIGTERM from Linux when the parent process ends.

    Kills this process at once if `parent_pid` is no longer its parent, since then no signal would come."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


# With the interpreter's default of 700, a collection took up to 3.5 ms in the conductor (64 instances, 2,600
# placements/s: 9 placements arrive meanwhile) and 50 ms in the gateway. The value must not be too large, since gRPC's
# server leaves a cycle of six objects, 950 bytes, behind every call (grpcio 1.85): with 100,000 that adds up to 16 MB.
_COLLECT_AFTER = 10_000
# Survivors of this many collections contain only calls that were in flight during one of them. Collecting the older
# generation takes 40 ms in a busy conductor, because its record of decisions is part of it.
_COLLECTIONS_BEFORE_OLDER = 100


@contextlib.contextmanager
def infrequent_gc() -> Iterator[None]:
    """Makes garbage collections rare within the block and excludes all objects that exist now from them.

    It is for processes whose event loop must answer within milliseconds."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, _COLLECTIONS_BEFORE_OLDER, before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
