"""A private Redis server that can be killed and comes back empty."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path
from threading import Timer

from deploy.ports import free_port

_START_S = 10.0
AWAY_S = 1.0
"""Delay from its end to its restart, as by a service manager."""


class Redis:
    """A Redis process on loopback, without persistence. Raises FileNotFoundError if redis-server is not installed."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise FileNotFoundError("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        here = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command = [binary, *here, "--save", "", "--appendonly", "no"]
        self._process = self._start()
        self._return: Timer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def come_back(self) -> None:
        """Schedules the restart of the killed server after `AWAY_S`."""
        self._return = Timer(AWAY_S, self._restart)
        self._return.start()

    def settle(self) -> None:
        """Waits until a scheduled restart is complete."""
        if self._return is not None:
            self._return.join()

    def close(self) -> None:
        self.settle()
        self._process.kill()
        self._process.wait()

    def _restart(self) -> None:
        self._process.wait()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        give_up_at = time.monotonic() + _START_S
        while time.monotonic() < give_up_at:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return process
            time.sleep(0.01)
        process.kill()
        raise TimeoutError(f"redis-server does not listen at port {self.port}")
