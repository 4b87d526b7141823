"""`moonserve serve`: runs a whole cluster on this machine, from the first progress line to the last process's end.

SIGUSR1 restarts every process, one after the other, without failing a request (`deploy.restarting`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deploy.config import ServeConfig
from deploy.display import Display
from deploy.environment import child_environment, log_folder, model_folder
from deploy.local import takes_requests
from deploy.plan import Kind, conductor_spec, member_specs
from deploy.ports import held_port
from deploy.restarting import RollingRestart
from deploy.supervisor import ChildDied, Supervisor
from engine.device import visible_gpus
from protocol import logs
from protocol.config import ENV_PREFIX, EXIT_INTERRUPTED, effective, run_command
from protocol.errors import ConfigError, MoonserveError
from protocol.process import die_with_parent, running
from protocol.rpc import Channels

_JOINED_WITHIN_S = 30.0
_JOIN_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Runs the command. `argv`: the arguments after `serve`; the first one may be the model."""
    return run_command(ServeConfig, run, argv, prog="moonserve serve", positional="--model")


def run(config: ServeConfig) -> int:
    """Runs the cluster until a signal stops it, and returns the exit code. Raises ConfigError."""
    try:
        # Before the event loop starts: a download would delay its signal handling.
        model_path = model_folder(config.model)
        with held_port(config.host, config.port, shared=config.gateways > 1) as port:
            config = replace(config, port=port.number)
            return asyncio.run(_serve(config, model_path, _log_dir(config), port.listener))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChildDied as error:
        print(f"moonserve serve: {error}", file=sys.stderr)
        return error.exit_code


async def _serve(config: ServeConfig, model_path: Path, log_dir: Path, listener: int | None) -> int:
    logs.configure("serve", log_format=config.log_format, level=config.log_level)
    logging.getLogger(__name__).debug("effective configuration: %s", effective(config))
    stopping, restarting = _on(signal.SIGTERM, signal.SIGINT), _on(signal.SIGUSR1)
    if config.parent_pid is not None:
        _stop_without(config.parent_pid, stopping)
    token = os.environ.get(f"{ENV_PREFIX}CLUSTER_TOKEN") or secrets.token_hex(16)
    environment = child_environment(os.environ, token, config.threads_per_worker)
    display = Display(sys.stdout)
    supervisor = Supervisor(log_dir, environment, display.refresh)
    with contextlib.closing(display):
        display.show_start(model_path, log_dir)
        display.follow(supervisor.children)
        start = _start(supervisor, config, model_path, _ledger(log_dir), listener)
        try:
            if await _unless_stopped(start, stopping):
                display.show_ready()
                conductors = (c for c in supervisor.children if c.spec.kind is Kind.CONDUCTOR)
                addresses = ",".join(conductor.facts["rpc"] for conductor in conductors)
                channels = partial(Channels, token, config.tls())
                rolling = RollingRestart(supervisor, addresses, channels)
                await _unless_stopped(_restarts(rolling, restarting, display), stopping)
            display.show_stopping()
        finally:
            await supervisor.stop()
    return 0


async def _unless_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Returns True if the work ended before `stopping` was set. Otherwise cancels it."""
    async with running(stopping.wait()) as stop, running(work) as working:
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False


async def _restarts(rolling: RollingRestart, wanted: asyncio.Event, display: Display) -> None:
    """Runs a rolling restart each time `wanted` is set, until cancelled."""
    while True:
        await wanted.wait()
        wanted.clear()
        outcome = "every process was restarted"
        try:
            await rolling.run()
        except MoonserveError as error:
            outcome = f"the rolling restart ended early: {error}"
        display.show_restarted(outcome)


async def _start(
    supervisor: Supervisor,
    config: ServeConfig,
    model_path: Path,
    ledger: Path,
    listener: int | None,
) -> None:
    conductors = await supervisor.start([conductor_spec(config, number=number) for number in range(config.conductors)])
    addresses = [conductor.facts["rpc"] for conductor in conductors]
    for number, (conductor, address) in enumerate(zip(conductors, addresses, strict=True)):
        # A restarted conductor must listen at the address that the other processes know.
        conductor.spec = conductor_spec(config, address.rpartition(":")[2], number)
    where = (str(model_path), ",".join(addresses), str(ledger), visible_gpus(os.environ), listener)
    members = await supervisor.start(member_specs(config, *where))
    url = next(member.facts["http"] for member in members if "http" in member.facts)
    await _until_joined(url)


async def _until_joined(url: str) -> None:
    """Waits until all have registered and the endpoint takes requests. Raises ConfigError on timeout."""
    try:
        async with asyncio.timeout(_JOINED_WITHIN_S):
            while not await asyncio.to_thread(takes_requests, url):  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(_JOIN_POLL_S)
    except TimeoutError:
        raise ConfigError(
            f"every process is ready, but {url}/ready does not say so within {_JOINED_WITHIN_S:.0f} s: "
            "the logs tell who could not join whom"
        ) from None


def _log_dir(config: ServeConfig) -> Path:
    path = log_folder(config.log_dir, f"serve-{config.port}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.log"):
            old.replace(old.with_suffix(".log.1"))
    except OSError as error:
        raise ConfigError(f"cannot write logs to {path}: {error.strerror}; see --log-dir") from error
    return path


def _ledger(log_dir: Path) -> Path:
    """Returns the file for the shares of workers with a common memory budget. Deletes that of an earlier run."""
    path = log_dir / "kv-memory"
    path.unlink(missing_ok=True)
    return path


def _on(*signals: signal.Signals) -> asyncio.Event:
    """Returns an event that is set when one of the signals arrives."""
    event = asyncio.Event()
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def _stop_without(pid: int, stopping: asyncio.Event) -> None:
    """Sets `stopping` when the process ends, or at once if it has ended."""
    loop = asyncio.get_running_loop()
    try:
        process = os.pidfd_open(pid)  # readable once the process has ended
    except ProcessLookupError:
        stopping.set()
        return
    except OSError:  # an old kernel, or a container that forbids pidfd_open
        die_with_parent(pid)
        return

    def ended() -> None:
        loop.remove_reader(process)
        stopping.set()

    loop.add_reader(process, ended)
