"""Tests of the launcher: it ends every process that it started, replaces processes, and restarts them in order."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import psutil
import pytest

from moonserve.deploy.launcher import ports, rolling_restart
from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.launcher.process_specs import ProcessKind, ProcessSpec
from moonserve.deploy.launcher.rolling_restart import RollingRestart
from moonserve.deploy.launcher.serve import Display
from moonserve.deploy.launcher.supervisor import Child, ChildDied, Supervisor, cause_of_death, lower_priority
from moonserve.protocol.errors import NoWorker, PeerLost
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from tests.patience import PATIENCE_S, until

# Test process: ready at once, with a second thread. After SIGTERM or SIGUSR1 it waits for the end of the process
# `--while-alive` (may be itself), prints the signal and ends. `--fails-if`: it exits with 3 if this file exists.
SERVING = """
import json, os, signal, sys, threading, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if Path(flags.get("--fails-if", "/nowhere")).exists():
    sys.exit(3)
said = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda got, _: said.append(got))
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
facts = {
    "pid": str(os.getpid()),
    "thread": str(other.native_id),
    "nice": str(os.getpriority(os.PRIO_PROCESS, 0)),
}
os.write(int(flags["--status-fd"]), json.dumps({"ready": facts}).encode() + b"\\n")
while not said:
    time.sleep(0.01)
while Path(f"/proc/{flags.get('--while-alive', 'nobody')}").exists():
    time.sleep(0.01)
print("ended by", signal.Signals(said[0]).name, flush=True)
"""

Launch = Callable[..., Awaitable[tuple[Supervisor, Child]]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Starts the process `SERVING` under a supervisor, which is stopped at the end."""
    (tmp_path / "serving.py").write_text(SERVING)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    made: list[Supervisor] = []

    async def begun(
        *flags: str, supervisor: Supervisor | None = None, may: Any = None, **fields: Any
    ) -> tuple[Supervisor, Child]:
        if supervisor is None:
            allowed = {} if may is None else {"may_restart": may}
            supervisor = Supervisor(tmp_path, environment, lambda: None, **allowed)
            made.append(supervisor)
        fields = {"kind": ProcessKind.STORE, "stop_grace_s": PATIENCE_S, **fields}  # time to print the signal
        name = f"it-{len(supervisor.children)}"
        [child] = await supervisor.start([ProcessSpec(instance_id=name, argv=("-m", "serving"), flags=flags, **fields)])
        return supervisor, child

    yield begun
    for each in made:
        await each.stop()


def process_of(child: Child) -> asyncio.subprocess.Process:
    assert child.process is not None
    return child.process


@pytest.mark.parametrize(("overlaps", "signal"), [(False, "SIGTERM"), (True, "SIGUSR1")])
async def test_a_restart_replaces_the_process(launch: Launch, overlaps: bool, signal: str) -> None:
    supervisor, child = await launch(overlaps=overlaps)
    old = process_of(child)
    await supervisor.restart(child)
    assert child.facts["pid"] == str(child.pid) != str(old.pid)
    await asyncio.to_thread(until, lambda: f"ended by {signal}" in child.log_path.read_text())
    assert process_of(child).returncode is None


async def test_a_process_without_a_log_writes_to_the_launchers_stderr(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process whose log cannot be opened is restarted and writes to the launcher's stderr."""
    supervisor, child = await launch()
    child.log_path.unlink()
    child.log_path.mkdir()
    process_of(child).kill()
    await asyncio.to_thread(until, lambda: child.restarts)
    await child.ready.wait()
    await supervisor.stop()
    assert "ended by SIGTERM" in capfd.readouterr().err


@pytest.mark.parametrize("has_process", [True, False])
async def test_an_overlapping_process_serves_on_if_its_successor_fails(
    launch: Launch, has_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves on even if no process can be created, for example without memory or a valid Python."""
    supervisor, child = await launch("--fails-if", str(tmp_path / "fails"), overlaps=True)
    old = process_of(child)
    if has_process:
        (tmp_path / "fails").touch()
    else:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    words = "exit code 3" if has_process else "could not be started: .*/nowhere/python"
    with pytest.raises(ChildDied, match=words):
        await supervisor.restart(child)
    assert (child.process, old.returncode) == (old, None)
    (tmp_path / "fails").unlink(missing_ok=True)
    monkeypatch.undo()
    await supervisor.restart(child)
    assert child.process is not old


async def test_a_death_at_start_is_reported_with_the_last_log_lines(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    with pytest.raises(ChildDied, match=r"it-0 ended with exit code 3 .* last log lines"):
        await launch("--fails-if", str(tmp_path / "fails"))


async def test_each_process_has_its_own_grace_period(launch: Launch) -> None:
    """One waits for its own end and is killed after its grace period; the other waits for the first and ends itself."""
    supervisor, killed = await launch("--while-alive", "self", stop_grace_s=0.1)
    _, patient = await launch("--while-alive", str(killed.pid), supervisor=supervisor)
    await supervisor.stop()
    assert [process_of(each).returncode for each in (killed, patient)] == [-9, 0]


async def test_a_dead_process_is_restarted_once_permitted(launch: Launch) -> None:
    """A launcher whose place another may have taken waits for permission before it restarts a process."""
    asked, allowed = asyncio.Event(), asyncio.Event()

    async def may_restart() -> None:
        asked.set()
        await allowed.wait()

    _, child = await launch(may=may_restart)
    process_of(child).kill()
    await asked.wait()
    assert (child.restarts, child.stage) == (0, "restarting")
    allowed.set()
    await child.ready.wait()
    assert child.restarts == 1


async def test_the_priority_of_all_threads_is_lowered_when_the_process_is_ready(launch: Launch) -> None:
    """Priority is lowered only when ready: at low priority a worker did not start on a busy machine within minutes."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    _, child = await launch(nice=ours + 3)
    assert child.facts["nice"] == str(ours)
    threads = (int(child.facts["pid"]), int(child.facts["thread"]))
    assert [os.getpriority(os.PRIO_PROCESS, each) for each in threads] == [ours + 3] * 2


def test_lowering_the_priority_of_an_ended_process_does_nothing() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as child:
        child.wait()
    lower_priority(child.pid, 19)


def test_a_cause_of_death_names_signal_exit_code_or_error() -> None:
    assert cause_of_death(-15, "Traceback\nlast") == "was killed by SIGTERM"
    assert "memory" in cause_of_death(-9, "")
    assert cause_of_death(-40, "") == "was killed by signal 40"
    assert cause_of_death(1, "") == "ended with exit code 1"
    assert cause_of_death(1, "Traceback …\nValueError: 7").endswith("saying: ValueError: 7")


def broken_pipe() -> IO[str]:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    return os.fdopen(write_fd, "w")


@pytest.mark.parametrize("make", [partial(open, "/dev/full", "w"), broken_pipe], ids=["full disk", "no reader"])
def test_display_errors_end_nothing(tmp_path: Path, make: Callable[[], IO[str]]) -> None:
    """They do not end the task that follows a process and updates the display."""
    child = Child(
        ProcessSpec(instance_id="it", kind=ProcessKind.STORE, argv=("-m", "it"), flags=()), tmp_path / "it.log"
    )
    output = make()  # closing it fails, as asserted below
    display = Display(output)
    display.show_start(tmp_path, tmp_path)
    display.follow([child])
    for stage in ("ready", "restarting"):
        child.stage = stage
        display.refresh()
    display.show_stopping()
    display.close()
    with pytest.raises(OSError, match=r"No space left|Broken pipe"):
        output.close()


TOKEN = "restarting-tests"


class Scene(conductor_pb2_grpc.ConductorServicer):
    """A conductor and a supervisor of two workers. A restarted worker is listed again after two requests."""

    def __init__(self, tmp_path: Path, silent_for: int) -> None:
        self.children = [
            Child(ProcessSpec(kind=kind, argv=("-m", "it"), instance_id=f"{kind}-0", flags=()), tmp_path)
            for kind in (ProcessKind.DECODE, ProcessKind.PREFILL)
        ]
        self.epochs = {child.spec.instance_id: 1 for child in self.children}
        self.silent_for = silent_for  # number of calls that fail
        self.away: list[str] = []  # each call removes an entry
        self.events: list[str] = []

    async def GetCluster(self, request: Any, context: Any) -> conductor_pb2.ClusterView:
        if self.silent_for:
            self.silent_for -= 1
            raise PeerLost("nobody leads")
        there = {name: epoch for name, epoch in self.epochs.items() if name not in self.away}
        if self.away:
            name = self.away.pop()
            if not self.away:
                self.events.append(f"{name} is back")
        return conductor_pb2.ClusterView(
            instances=[{"endpoint": {"instance_id": name, "epoch": epoch}} for name, epoch in there.items()]
        )

    async def restart(self, child: Child) -> None:
        name = child.spec.instance_id
        self.events.append(f"{name} is restarted")
        self.epochs[name] += 1
        self.away = [name, name]

    async def run(self) -> list[str]:
        server = RpcServer(TOKEN)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, server.grpc)
        async with server.serving("127.0.0.1", 0, 0.0) as address, asyncio.timeout(PATIENCE_S):
            supervisor = cast(Supervisor, self)
            await RollingRestart(supervisor, address, lambda: Channels(TOKEN)).run()
        return self.events


@pytest.mark.parametrize("silent_for", [0, 2])
async def test_a_rolling_restart_waits_until_each_process_has_rejoined(tmp_path: Path, silent_for: int) -> None:
    """A conductor that does not answer is asked again: its silence does not mean that workers are absent."""
    assert await Scene(tmp_path, silent_for).run() == [
        *("prefill-0 is restarted", "prefill-0 is back"),
        *("decode-0 is restarted", "decode-0 is back"),
    ]


async def test_nothing_restarts_while_no_conductor_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling_restart, "REJOIN_TIMEOUT_S", 0.2)
    scene = Scene(tmp_path, 10**6)
    with pytest.raises(NoWorker, match="no conductor listed"):
        await scene.run()
    assert not scene.events


_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_free_ports_are_distinct_and_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free ports are distinct and outside the ephemeral range, even if each search begins at the same port."""
    monkeypatch.setattr(ports.random, "randrange", lambda span: 0)
    first = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        given = [free_port() for _ in range(100)]
        assert taken.getsockname()[1] not in given
    assert len(set(given)) == len(given)
    assert max(given) < first


def test_two_processes_get_different_free_ports() -> None:
    """Ports given to one process are not given to another, even without listeners and from the same first port."""
    ours = free_port(3)
    code = "from moonserve.deploy.launcher import ports; "
    code += f"ports.random.randrange = lambda span: {ours} - {ports.FIRST_PORT}; print(ports.free_port())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) not in range(ours, ours + 3)


STARTS_ONE = """
import sys, time
from pathlib import Path
from moonserve.deploy.launcher.local_cluster import LocalCluster

cluster = LocalCluster(None, log_dir=Path(sys.argv[1]))
print(cluster.process.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_cluster_ends_with_its_starter(tmp_path: Path, begun: bool) -> None:
    """Its processes end when the starter is killed, both before the launcher watches the starter and later."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, str(tmp_path), str(PATIENCE_S)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter.stdout as stdout:
        launcher = psutil.Process(int(stdout.readline()))
    if begun:  # its processes have started too
        until((tmp_path / "decode-0.log").exists)
    processes = [launcher, *launcher.children(recursive=True)]
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive
