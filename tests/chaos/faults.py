"""Fault schedules, determined by a seed, a duration and the cluster's processes, and their injection into a cluster.

A process that is starting is not hit. Otherwise it might never serve on a slow machine.
"""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from tests.e2e.cluster import Cluster

FIRST_AT_S = 4.0
"""Time of the first fault. The clients are running by then."""
MEAN_PAUSE_S = 5.0
QUIET_END_S = 10.0
"""Time without new faults at the end, in which restarted processes come back."""
SHORTEST_STOP_S, LONGEST_STOP_S = 0.2, 20.0
SS = shutil.which("ss")


class Kind(StrEnum):
    """Kind of a fault."""

    KILL = "kill"  # SIGKILL; the launcher restarts the process
    STOP = "stop"  # SIGSTOP, and SIGCONT later
    RESET = "reset"  # reset of all TCP connections that the process has accepted
    DISK = "disk"  # changed bytes in, or truncation of, a file of the store's disk


WEIGHTS = {Kind.KILL: 4, Kind.STOP: 3, Kind.RESET: 3, Kind.DISK: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    at_s: float  # since the clients began
    kind: Kind
    victim: str  # instance id
    lasts_s: float  # duration of a stop
    chance: int  # seed of further random choices


def schedule(seed: int, duration_s: float, victims: Sequence[str]) -> list[Fault]:
    """Returns faults in order of time. `victims` are instance ids; only those that begin with "store" have a disk."""
    dice = random.Random(seed)
    stores = [name for name in victims if name.startswith("store")]
    faults: list[Fault] = []
    at_s = FIRST_AT_S
    while at_s < duration_s - QUIET_END_S:
        kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        # Most stops are shorter than all timeouts, some longer than all timeouts.
        lasts_s = min(LONGEST_STOP_S, SHORTEST_STOP_S + dice.expovariate(1 / 4))
        victim = dice.choice(stores if kind is Kind.DISK else list(victims))
        lasts_s = min(lasts_s, duration_s - QUIET_END_S - at_s)
        chance = dice.getrandbits(32)
        faults.append(Fault(at_s=at_s, kind=kind, victim=victim, lasts_s=lasts_s, chance=chance))
        at_s += dice.expovariate(1 / MEAN_PAUSE_S)
    return faults


_TICK_S, _LONGEST_TICK_S = 0.05, 2.0  # a longer gap means that the machine was suspended


class Clock(threading.Thread):
    """Clock that does not advance while the whole machine is suspended, as a virtual machine may be. With a real clock,
    clients would report silence, and all faults that were due meanwhile would happen at once."""

    def __init__(self) -> None:
        super().__init__(name="clock", daemon=True)
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._ticked_at = time.monotonic()
        self.start()

    def run(self) -> None:
        while True:
            self.now()
            time.sleep(_TICK_S)

    def now(self) -> float:
        """Returns the seconds since the clock was created."""
        with self._lock:
            at = time.monotonic()
            self._now_s += min(at - self._ticked_at, _LONGEST_TICK_S)
            self._ticked_at = at
            return self._now_s


class Striking(threading.Thread):
    """Injects each fault at its time, from `start` until `relieve`. `done` counts faults by kind and kind of process;
    `skipped` counts those whose victim was dead or starting."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], disk: Path, clock: Clock) -> None:
        super().__init__(name="faults")
        self._cluster, self._faults, self._disk, self._clock = cluster, faults, disk, clock
        self._stopped: dict[int, float] = {}  # process id → time of its SIGCONT
        self._ending = False
        self.done: Counter[str] = Counter()
        self.skipped = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        began_at = self._clock.now()
        try:
            for fault in self._faults:
                self._wait_until(began_at + fault.at_s)
                if self._ending:
                    return
                self._strike(fault)
            self._wait_until(max(self._stopped.values(), default=0.0))
        except BaseException as error:  # raised by `relieve`
            self.error = error

    def relieve(self) -> None:
        """Ends the injection and continues all stopped processes. Raises the error that ended the thread, if any."""
        self._ending = True
        self.join()
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
        """Overwrites some bytes of a file of the disk, or truncates it. Returns False if there is no file."""
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
    """Returns the ports on which a process listens: none before it serves. Raises psutil.NoSuchProcess."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def _reset(ports: Sequence[int]) -> bool:
    """Resets all connections accepted on the given ports. Returns False if the system has no `ss`."""
    if SS is None:
        return False
    for port in ports:
        command = [SS, "-K", "state", "established", "sport", "=", f":{port}"]
        subprocess.run(command, capture_output=True, check=False)
    return True
