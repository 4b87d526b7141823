"""What the launcher starts, it ends: in order where that works in time, by force where it does not."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.plan import ProcessSpec
from deploy.supervisor import Child, ChildDied, Supervisor, cause_of_death
from tests.patience import PATIENCE_S

# A process that is ready at once and, told to stop, goes on for as long as the process in `--while-alive` does, or for
# ever.
STUBBORN = """
import json, os, signal, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
os.write(int(flags["--status-fd"]), json.dumps({"ready": {}}).encode() + b"\\n")
while not told:
    time.sleep(0.01)
other = flags.get("--while-alive")
while other is None or Path(f"/proc/{other}").exists():
    time.sleep(0.01)
"""


# Ready at once; ends on either signal, and says which. `--fails-if`: not where this file exists.
SERVING = """
import json, os, signal, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if Path(flags["--fails-if"]).exists():
    sys.exit(3)
said = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda got, _: said.append(got))
os.write(int(flags["--status-fd"]), json.dumps({"ready": {"pid": str(os.getpid())}}).encode() + b"\\n")
while not said:
    time.sleep(0.01)
print("ended by", signal.Signals(said[0]).name, flush=True)
"""


@pytest.fixture
async def serving(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Supervisor, Child]]:
    """A process that overlaps with its successor, or does not."""
    (tmp_path / "serving.py").write_text(SERVING)
    supervisor = Supervisor(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}, lambda: None)
    spec = ProcessSpec(
        instance_id="it",
        module="serving",
        flags=("--fails-if", str(tmp_path / "fails")),
        overlaps=request.param,
        stop_grace_s=PATIENCE_S,  # to say which signal it was
    )
    [child] = await supervisor.start([spec])
    yield supervisor, child
    await supervisor.stop()


@pytest.mark.parametrize(
    ("serving", "signal"), [(False, "SIGTERM"), (True, "SIGUSR1")], indirect=["serving"]
)
async def test_a_process_gives_way_to_a_successor(
    serving: tuple[Supervisor, Child], signal: str
) -> None:
    supervisor, child = serving
    old = child.process
    assert old is not None
    await supervisor.restart(child)
    assert child.facts["pid"] == str(child.pid) != str(old.pid)
    async with asyncio.timeout(PATIENCE_S):
        await old.wait()
        while f"ended by {signal}" not in child.log_path.read_text():  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.01)
    assert child.process is not None
    assert child.process.returncode is None


@pytest.mark.parametrize("serving", [False], indirect=True)
async def test_one_whose_log_cannot_be_opened_any_more_starts_again_and_writes_where_the_launcher_does(
    serving: tuple[Supervisor, Child], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor, child = serving
    assert child.process is not None
    child.log_path.unlink()
    child.log_path.mkdir()
    child.process.kill()
    async with asyncio.timeout(PATIENCE_S):
        while not child.restarts:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        await child.ready.wait()
    await supervisor.stop()
    assert "ended by SIGTERM" in capfd.readouterr().err


@pytest.mark.parametrize("serving", [True], indirect=True)
async def test_one_whose_successor_does_not_come_up_serves_on(
    serving: tuple[Supervisor, Child], tmp_path: Path
) -> None:
    supervisor, child = serving
    old = child.process
    (tmp_path / "fails").touch()
    with pytest.raises(ChildDied):
        await supervisor.restart(child)
    assert child.process is old
    assert old is not None
    assert old.returncode is None
    (tmp_path / "fails").unlink()
    await supervisor.restart(child)
    assert child.process is not old


@pytest.mark.parametrize("serving", [True], indirect=True)
async def test_one_whose_successor_cannot_even_be_started_serves_on(
    serving: tuple[Supervisor, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no memory, no descriptor, or another Python by now."""
    supervisor, child = serving
    old = child.process
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ChildDied, match=r"it could not be started: .*/nowhere/python"):
        await supervisor.restart(child)
    assert child.process is old
    monkeypatch.undo()
    await supervisor.restart(child)
    assert child.process is not old


async def test_each_process_has_its_own_time_to_stop(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    supervisor = Supervisor(tmp_path, environment, lambda: None)
    short = ProcessSpec(instance_id="short", module="stubborn", flags=(), stop_grace_s=0.1)
    [killed] = await supervisor.start([short])
    waiting = ProcessSpec(
        instance_id="patient",
        module="stubborn",
        flags=("--while-alive", str(killed.pid)),
        stop_grace_s=60.0,
    )
    [patient] = await supervisor.start([waiting])
    await supervisor.stop()
    assert killed.process is not None
    assert patient.process is not None
    assert killed.process.returncode == -9
    assert patient.process.returncode == 0


async def test_a_process_that_died_starts_again_when_it_may(tmp_path: Path) -> None:
    """Whoever may have been taken over from is asked first."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked, allowed = asyncio.Event(), asyncio.Event()

    async def may_restart() -> None:
        asked.set()
        await allowed.wait()

    supervisor = Supervisor(tmp_path, environment, lambda: None, may_restart)
    spec = ProcessSpec(instance_id="one", module="stubborn", flags=(), stop_grace_s=0.1)
    [child] = await supervisor.start([spec])
    assert child.process is not None
    child.process.kill()
    await asked.wait()
    assert (child.restarts, child.stage) == (0, "restarting")
    allowed.set()
    await child.ready.wait()
    assert child.restarts == 1
    await supervisor.stop()


def test_a_death_is_told_in_half_a_sentence() -> None:
    assert cause_of_death(-15, "Traceback\nlast") == "was killed by SIGTERM"
    assert "memory" in cause_of_death(-9, "")
    assert cause_of_death(-40, "") == "was killed by signal 40"
    assert cause_of_death(1, "") == "ended with exit code 1"
    assert cause_of_death(1, "Traceback …\nValueError: 7").endswith("saying: ValueError: 7")
