"""Faults, done to a running cluster of real processes.

Whoever is starting is left alone: beaten down again and again before it serves, it would tell how slow the machine is.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.chaos.clock import Clock
from tests.chaos.schedule import Fault, Kind
from tests.e2e.cluster import Cluster

SS = shutil.which("ss")


class Striking(threading.Thread):
    """Strikes at each fault's time, from `start` on; `join` it, then `relieve`. `done` counts by kind and kind of
    process, `skipped` what was not done: whoever was to be hit was dead already, or starting."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], disk: Path, clock: Clock) -> None:
        super().__init__(name="faults")
        self._cluster = cluster
        self._faults = faults
        self._clock = clock
        self._disk = disk
        self._stopped: dict[int, float] = {}  # process id → when it goes on
        self._began_at = 0.0
        self._ending = False
        self.done: Counter[str] = Counter()
        self.skipped = 0
        self.log: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        self._began_at = self._clock.now()
        try:
            for fault in self._faults:
                self._wait_until(self._began_at + fault.at_s)
                if self._ending:
                    return
                self._strike(fault)
            self._wait_until(max(self._stopped.values(), default=0.0))
        except BaseException as error:  # told by whoever joins
            self.error = error

    def end(self) -> None:
        """Nothing new happens."""
        self._ending = True

    def relieve(self) -> None:
        """Everybody goes on. Raises what ended the thread."""
        for pid in list(self._stopped):
            self._go_on(pid)
        if self.error is not None:
            raise self.error

    def _wait_until(self, at: float) -> None:
        while not self._ending:
            now = self._clock.now()
            for pid in [pid for pid, ends_at in self._stopped.items() if ends_at <= now]:
                self._go_on(pid)
            if now >= at:
                return
            time.sleep(min(at - now, 0.1))

    def _strike(self, fault: Fault) -> None:
        pid = self._cluster.pids().get(fault.victim)
        if pid is None or not self._hits(fault, pid):
            self.skipped += 1
            return
        self.done[f"{fault.kind} {fault.victim.rpartition('-')[0] or fault.victim}"] += 1
        self.log.append(f"{self._clock.now() - self._began_at:7.1f} s {fault.kind} {fault.victim}")

    def _hits(self, fault: Fault, pid: int) -> bool:
        try:
            ports = _listening(pid)
            if not ports and fault.kind is not Kind.DISK:
                return False
            match fault.kind:
                case Kind.KILL:
                    os.kill(pid, signal.SIGKILL)
                    self._stopped.pop(pid, None)
                case Kind.STOP:
                    os.kill(pid, signal.SIGSTOP)
                    self._stopped[pid] = self._clock.now() + fault.lasts_s
                case Kind.RESET:
                    return _reset(ports)
                case Kind.DISK:
                    return self._spoil(fault)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    def _go_on(self, pid: int) -> None:
        del self._stopped[pid]
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    def _spoil(self, fault: Fault) -> bool:
        """A few bytes of one of the disk's files become others, or its last part is gone."""
        dice = random.Random(fault.chance)
        files = sorted(p for p in self._disk.rglob("*") if p.is_file() and p.stat().st_size > 4096)
        if not files:
            return False
        path = dice.choice(files)
        size = path.stat().st_size
        if dice.random() < 0.3:
            os.truncate(path, dice.randrange(size))
            return True
        with path.open("r+b") as file:
            for _ in range(16):
                file.seek(dice.randrange(size))
                file.write(dice.randbytes(8))
        return True


def _listening(pid: int) -> list[int]:
    """Ports, from when it serves on. Raises psutil.NoSuchProcess."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def _reset(ports: Sequence[int]) -> bool:
    """Of which connections were made from elsewhere. False where the system cannot."""
    if SS is None:
        return False
    for port in ports:
        command = [SS, "-K", "state", "established", "sport", "=", f":{port}"]
        subprocess.run(command, capture_output=True, check=False)
    return True
