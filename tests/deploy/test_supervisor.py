"""What the launcher starts, it ends: in order where that works in time, by force where it does not."""

from __future__ import annotations

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
