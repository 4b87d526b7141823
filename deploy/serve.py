"""`moonserve serve`: a whole cluster on this machine, from the first progress line to the last process's end.

SIGUSR1 restarts every process, one after the other, without failing a request (`deploy.restarting`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.config import ServeConfig
from deploy.display import Display
from deploy.environment import child_environment
from deploy.local import takes_requests
from deploy.model import model_folder
from deploy.plan import conductor_spec, member_specs
from deploy.port import held_port
from deploy.restarting import RollingRestart
from deploy.supervisor import ChildDied, Supervisor
from engine.device import visible_gpus
from protocol import logs
from protocol.config import ENV_PREFIX, HelpRequested, effective, load
from protocol.errors import ConfigError, MoonserveError
from protocol.process import EXIT_CONFIG, die_with_parent, running
from protocol.rpc import Channels

EXIT_INTERRUPTED = 130  # as shells report SIGINT
_JOINED_WITHIN_S = 30.0
_JOIN_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """`argv`: the arguments after `serve`; the first one may be the model."""
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0:1] = ["--model", arguments[0]]
    try:
        config = load(ServeConfig, arguments, prog="moonserve serve", environ=dict(os.environ))
        # Before the event loop, whose signal handling a download would hold up.
        model_path = model_folder(config.model)
        with held_port(config) as port:
            config = replace(config, port=port.number)
            return asyncio.run(_serve(config, model_path, _log_dir(config), port.listener))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except HelpRequested as request:
        print(request)
        return 0
    except ConfigError as error:
        print(f"moonserve serve: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except ChildDied as error:
        print(f"moonserve serve: {error}", file=sys.stderr)
        return error.exit_code


async def _serve(config: ServeConfig, model_path: Path, log_dir: Path, listener: int | None) -> int:
    logs.configure("serve", log_format=config.log_format, level=config.log_level)
    logging.getLogger(__name__).debug("effective configuration: %s", effective(config))
    stopping, restarting = _stop_on_signals(), _restart_on_signal()
    if config.parent_pid is not None:
        _stop_without(config.parent_pid, stopping)
    environment = _environment(config)
    with _display(model_path, log_dir) as display:
        supervisor = Supervisor(log_dir, environment, display.refresh)
        display.follow(supervisor.children)
        start = _start(supervisor, config, model_path, _ledger(log_dir), listener)
        try:
            if await _unless_stopped(start, stopping):
                display.show_ready()
                rolling = _rolling(supervisor, config, environment)
                await _unless_stopped(_restarts(rolling, restarting, display), stopping)
            display.show_stopping()
        finally:
            await supervisor.stop()
    return 0


async def _unless_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Whether the work ended before someone asked to stop; else it is cancelled."""
    async with running(stopping.wait()) as stop, running(work) as working:
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False


def _rolling(
    supervisor: Supervisor, config: ServeConfig, environment: Mapping[str, str]
) -> RollingRestart:
    conductors = (c for c in supervisor.children if c.spec.module == "conductor")
    addresses = ",".join(conductor.facts["rpc"] for conductor in conductors)
    token = environment[f"{ENV_PREFIX}CLUSTER_TOKEN"]
    return RollingRestart(supervisor, addresses, lambda: Channels(token, config.tls()))


async def _restarts(rolling: RollingRestart, wanted: asyncio.Event, display: Display) -> None:
    """A rolling restart whenever one is asked for, until cancelled."""
    while True:
        await wanted.wait()
        wanted.clear()
        try:
            await rolling.run()
        except MoonserveError as error:
            display.show_restarted(f"the rolling restart ended early: {error}")
        else:
            display.show_restarted("every process was restarted")


async def _start(
    supervisor: Supervisor,
    config: ServeConfig,
    model_path: Path,
    ledger: Path,
    listener: int | None,
) -> None:
    conductors = await supervisor.start(
        [conductor_spec(config, number=number) for number in range(config.conductors)]
    )
    addresses = [conductor.facts["rpc"] for conductor in conductors]
    for number, (conductor, address) in enumerate(zip(conductors, addresses, strict=True)):
        # A restarted conductor must be found where the others look for it.
        conductor.spec = conductor_spec(config, address.rpartition(":")[2], number)
    members = await supervisor.start(
        member_specs(
            config,
            str(model_path),
            ",".join(addresses),
            str(ledger),
            visible_gpus(os.environ),
            listener,
        )
    )
    url = next(member.facts["http"] for member in members if "http" in member.facts)
    await _until_joined(url)


async def _until_joined(url: str) -> None:
    """A process is ready before conductor and gateway have heard of it. Raises ConfigError when they never do."""
    try:
        async with asyncio.timeout(_JOINED_WITHIN_S):
            while not await asyncio.to_thread(takes_requests, url):  # noqa: ASYNC110 - it is elsewhere
                await asyncio.sleep(_JOIN_POLL_S)
    except TimeoutError:
        raise ConfigError(
            f"every process is ready, but {url}/ready does not say so within {_JOINED_WITHIN_S:.0f} s: "
            "the logs tell who could not join whom"
        ) from None


def _log_dir(config: ServeConfig) -> Path:
    if config.log_dir is not None:
        path = Path(config.log_dir)
    else:
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        path = Path(state) / "moonserve" / f"serve-{config.port}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.log"):
            old.replace(old.with_suffix(".log.1"))
    except OSError as error:
        raise ConfigError(
            f"cannot write logs to {path}: {error.strerror}; see --log-dir"
        ) from error
    return path


def _ledger(log_dir: Path) -> Path:
    """Where workers that share a memory budget keep their shares; an earlier run's are gone."""
    path = log_dir / "kv-memory"
    path.unlink(missing_ok=True)
    return path


def _environment(config: ServeConfig) -> dict[str, str]:
    token = os.environ.get(f"{ENV_PREFIX}CLUSTER_TOKEN") or secrets.token_hex(16)
    return child_environment(os.environ, token, config.threads_per_worker)


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def _stop_without(pid: int, stopping: asyncio.Event) -> None:
    """`stopping` is set when that process ends, or now if it has."""
    loop = asyncio.get_running_loop()
    try:
        process = os.pidfd_open(pid)  # readable from its end on
    except ProcessLookupError:
        stopping.set()
        return
    except OSError:  # an old kernel, or a container that forbids it
        die_with_parent(pid)
        return

    def ended() -> None:
        loop.remove_reader(process)
        stopping.set()

    loop.add_reader(process, ended)


def _restart_on_signal() -> asyncio.Event:
    wanted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, wanted.set)
    return wanted


@contextlib.contextmanager
def _display(model_path: Path, log_dir: Path) -> Iterator[Display]:
    display = Display(sys.stdout)
    display.show_start(model_path, log_dir)
    try:
        yield display
    finally:
        display.close()
