"""`deploy.local`: a cluster that lasts as long as who started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.e2e

STARTS_ONE = """
import sys, time
from pathlib import Path
from deploy.local import LocalCluster

cluster = LocalCluster(None, log_dir=Path(sys.argv[1]))
print(cluster.process.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_cluster_ends_with_who_started_it(tmp_path: Path, begun: bool) -> None:
    """Killed, so that nothing of its own could stop it; before the launcher looks for it, and later."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, str(tmp_path), str(PATIENCE_S)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter.stdout as stdout:
        launcher = psutil.Process(int(stdout.readline()))
    if begun:  # its processes, too
        until((tmp_path / "decode-0.log").exists)
    processes = [launcher, *launcher.children(recursive=True)]
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive
