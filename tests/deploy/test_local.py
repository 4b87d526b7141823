"""A cluster on one machine: ports for servers that start again, and an end with who started it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy import ports
from deploy.ports import free_port
from tests.patience import PATIENCE_S, until

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_the_kernel_gives_none_of_them_to_connections_and_none_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the search begins at the same one."""
    monkeypatch.setattr(ports.random, "randrange", lambda span: 0)
    first = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        given = [free_port() for _ in range(100)]
        assert taken.getsockname()[1] not in given
    assert len(set(given)) == len(given)
    assert max(given) < first


def test_another_process_gets_other_ports() -> None:
    """Also while nobody listens on them, and where it begins to look at the same one."""
    ours = free_port(3)
    code = f"from deploy import ports; ports.random.randrange = lambda span: {ours} - {ports.FIRST_PORT}; "
    code += "print(ports.free_port())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) not in range(ours, ours + 3)


STARTS_ONE = """
import sys, time
from pathlib import Path
from deploy.local import LocalCluster

cluster = LocalCluster(None, log_dir=Path(sys.argv[1]))
print(cluster.process.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.e2e
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
