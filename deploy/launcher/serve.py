"""`moonserve serve`: runs a whole cluster on this machine, from the first progress line to the last process's end.

SIGUSR1 restarts every process, one after the other, without failing a request (`deploy.launcher.rolling_restart`).
"""

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
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.launcher.local_cluster import READY, endpoint_is_ready
from moonserve.deploy.launcher.model_check import model_folder
from moonserve.deploy.launcher.ports import free_port, reserve_port
from moonserve.deploy.launcher.process_specs import (
    HostOptions,
    ProcessKind,
    conductor_spec,
    directory_spec,
    member_specs,
)
from moonserve.deploy.launcher.rolling_restart import RollingRestart
from moonserve.deploy.launcher.supervisor import Child, ChildDied, Supervisor, child_environment, log_folder
from moonserve.deploy.launcher.vllm_workers import vllm_python
from moonserve.engine.cuda.device import visible_gpus
from moonserve.protocol.errors import ConfigError, MoonserveError
from moonserve.protocol.process import logs
from moonserve.protocol.process.config import ENV_PREFIX, EXIT_INTERRUPTED, masked_values, run_command
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import die_with_parent
from moonserve.protocol.rpc.grpc_transport import Channels

# -- the display

_STYLES = {"ready": "green", "restarting": "red"}


class _Console(Console):
    """A console whose reader may vanish. rich would end the program, and with it the orderly stop of the cluster."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Display:
    """Display of the stages and addresses of one launcher's processes. On a terminal, a table is redrawn in place.
    Elsewhere, each change of a stage prints one line. Output that cannot be written, for example to a full disk, is
    dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._console = _Console(file=stream, highlight=False, soft_wrap=True)
        self._children: list[Child] = []
        self._shown: dict[str, str] = {}  # stage already printed, per instance
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._table, transient=True)

    def follow(self, children: list[Child]) -> None:
        """Displays these processes from now on. The caller may add to the list."""
        self._children = children
        if self._console.is_terminal:
            self._live.start()

    def refresh(self) -> None:
        """Updates the display after a process has reported a change."""
        if self._live.is_started:
            with contextlib.suppress(OSError):
                self._live.refresh()
            return
        for child in self._children:
            name = child.spec.instance_id
            if self._shown.get(name) != child.stage:
                self._shown[name] = child.stage
                self._print(f"{name:12} {child.stage}", markup=False)

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def show_start(self, model_path: Path, log_dir: Path) -> None:
        self._print(f"model {model_path}", markup=False)
        self._print(f"logs  {log_dir}", markup=False)

    def show_ready(self) -> None:
        """Prints the table of processes, the ready line and a command to try."""
        self.close()
        url = next(c.facts["http"] for c in self._children if "http" in c.facts)
        self._print(self._table())
        self._print(f"{READY} {url}   dashboard {url}/dashboard")
        self._print("Try it:")
        self._print(
            f"  curl {url}/v1/completions -H 'Content-Type: application/json' "
            '-d \'{"prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0.7}\'',
            markup=False,
        )
        self._print(f"Ctrl-C stops everything; kill -USR1 {os.getpid()} restarts it while it serves.")

    def show_restarted(self, outcome: str) -> None:
        """Prints the outcome of a rolling restart."""
        self._print(outcome, markup=False)

    def show_stopping(self) -> None:
        self._print("stopping …")

    def _print(self, what: Any, **how: Any) -> None:
        with contextlib.suppress(OSError):
            self._console.print(what, **how)

    def _table(self) -> Table:
        names = ("process", "pid", "state", "where")
        table = Table(*names, box=None, pad_edge=False, header_style="dim")
        for child in self._children:
            is_under_way = child.fraction is not None and child.stage != "ready"
            state = f"{child.stage} {child.fraction:.0%}" if is_under_way else child.stage
            table.add_row(
                child.spec.instance_id,
                str(child.pid or ""),
                Text(state, style=_STYLES.get(child.stage, "yellow")),
                child.facts.get("http") or child.facts.get("rpc", ""),
            )
        return table


_JOINED_WITHIN_S = 30.0
_BOUND_THREADS = "VLLM_CPU_OMP_THREADS_BIND"  # set by a user who binds vLLM's threads
_JOIN_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Runs the command. `argv`: the arguments after `serve`; the first one may be the model."""
    return run_command(ServeConfig, run, argv, prog="moonserve serve", positional="--model")


def run(config: ServeConfig) -> int:
    """Runs the cluster until a signal stops it, and returns the exit code. Raises ConfigError."""
    try:
        # Before the event loop starts: a download would delay its signal handling.
        model_path = model_folder(config)
        if config.engine == "vllm":
            config = replace(config, vllm_python=vllm_python(config))
        with reserve_port(config.host, config.port, shared=config.gateways > 1) as port:
            config = replace(config, port=port.number)
            return asyncio.run(_serve(config, model_path, _log_dir(config), port.listener))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ChildDied as error:
        print(f"moonserve serve: {error}", file=sys.stderr)
        return error.exit_code


async def _serve(config: ServeConfig, model_path: Path, log_dir: Path, listener: int | None) -> int:
    logs.configure("serve", log_format=config.log_format, level=config.log_level)
    logging.getLogger(__name__).debug("effective configuration: %s", masked_values(config))
    stopping, restarting = _event_on(signal.SIGTERM, signal.SIGINT), _event_on(signal.SIGUSR1)
    if config.parent_pid is not None:
        _stop_when_process_ends(config.parent_pid, stopping)
    token = os.environ.get(f"{ENV_PREFIX}CLUSTER_TOKEN") or secrets.token_hex(16)
    environment = child_environment(os.environ, token, config.threads_per_worker)
    display = Display(sys.stdout)
    supervisor = Supervisor(log_dir, environment, display.refresh)
    with contextlib.closing(display):
        display.show_start(model_path, log_dir)
        display.follow(supervisor.children)
        start = _start(supervisor, config, model_path, _ledger(log_dir), listener)
        try:
            if await _run_until_stopped(start, stopping):
                display.show_ready()
                conductors = (c for c in supervisor.children if c.spec.kind is ProcessKind.CONDUCTOR)
                addresses = ",".join(conductor.facts["rpc"] for conductor in conductors)
                channels = partial(Channels, token, config.tls())
                rolling = RollingRestart(supervisor, addresses, channels)
                await _run_until_stopped(_restarts(rolling, restarting, display), stopping)
            display.show_stopping()
        finally:
            await supervisor.stop()
    return 0


async def _run_until_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Returns True if the work ended before `stopping` was set. Otherwise cancels it."""
    async with background_task(stopping.wait()) as stop, background_task(work) as working:
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
    numbers = range(config.num_conductors)
    # Active conductors have to know the addresses of all before they start.
    ports = [str(free_port()) if config.active_conductors > 1 else "0" for _ in numbers]
    known = ",".join(f"127.0.0.1:{port}" for port in ports)
    specs = [conductor_spec(config, ports[number], number, addresses=known) for number in numbers]
    conductors = await supervisor.start(specs)
    addresses = [conductor.facts["rpc"] for conductor in conductors]
    for number, (conductor, address) in enumerate(zip(conductors, addresses, strict=True)):
        # A restarted conductor must listen at the address that the other processes know.
        conductor.spec = conductor_spec(config, address.rpartition(":")[2], number, addresses=known)
    where = (str(model_path), ",".join(addresses), str(ledger), visible_gpus(os.environ), listener)
    registry = await _start_registry(supervisor, config)
    cores = () if _BOUND_THREADS in os.environ else sorted(os.sched_getaffinity(0))
    table = os.memfd_create("moonserve-cores")
    specs = member_specs(config, *where, registry=registry, cores=cores, core_table=table)
    members = await supervisor.start(specs)
    url = next(member.facts["http"] for member in members if "http" in member.facts)
    await _until_joined(url)


async def _start_registry(supervisor: Supervisor, config: ServeConfig) -> str | None:
    """Returns the registry where vLLM's workers find store nodes, and starts it unless one is configured."""
    if config.engine != "vllm" or not config.kv_connector or not config.store_nodes:
        return None
    if config.registry is not None:
        return config.registry
    [directory] = await supervisor.start([directory_spec(config, HostOptions(conductor=""), free_port())])
    return directory.facts["rpc"]


async def _until_joined(url: str) -> None:
    """Waits until all have registered and the endpoint takes requests. Raises ConfigError on timeout."""
    try:
        async with asyncio.timeout(_JOINED_WITHIN_S):
            while not await asyncio.to_thread(endpoint_is_ready, url):  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(_JOIN_POLL_S)
    except TimeoutError:
        raise ConfigError(
            f"every process is ready, but {url}/ready did not confirm it within {_JOINED_WITHIN_S:.0f} s: "
            "the logs show which process could not join"
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


def _event_on(*signals: signal.Signals) -> asyncio.Event:
    """Returns an event that is set when one of the signals arrives."""
    event = asyncio.Event()
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def _stop_when_process_ends(pid: int, stopping: asyncio.Event) -> None:
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
