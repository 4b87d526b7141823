"""What the launcher starts, it ends: in order where that works in time, by force where it does not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from deploy.plan import ProcessSpec
from deploy.supervisor import Supervisor

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
