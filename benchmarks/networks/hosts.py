"""Creates network namespaces that act as hosts, and the links between them (`wires.c`).

Its rule: no namespace or device remains when the block ends. Links are simulated in user space, because not every
kernel has sch_netem. TCP sees the same effects: delay, loss, a rate limit with a queue, and silence.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moonserve.protocol.process.native_libraries import COMPILERS

T = TypeVar("T")

NETWORK = "10.77.0"
_SOURCE = Path(__file__).with_name("link_emulator.c")
_TUN = "/dev/net/tun"
# linux/if_tun.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000  # linux/sched.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Properties of the link through which a host sends all its packets."""

    delay_s: float = 0.0
    """One-way delay."""
    loss: float = 0.0
    """Share of packets that are lost, independently of each other."""
    bytes_per_s: float = 0.0
    """0 = unlimited."""
    queue_s: float = 0.05
    """Length of the queue before the link, in seconds of its rate; further packets are dropped."""


@dataclass(frozen=True, slots=True)
class PacketCounts:
    """Numbers of packets that a host sent, and of those that were lost, cut off or dropped by the queue."""

    sent: int
    lost: int
    cut: int
    overflown: int


class Network:
    """Hosts 0, 1, … that reach each other at `address(host)`; links can be shaped and cut."""

    def __init__(self, names: Sequence[str], wires: subprocess.Popen[str]) -> None:
        self.names = names
        self._wires = wires
        self._lock = threading.Lock()

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def start(self, host: int, command: Sequence[str], **of_popen: Any) -> subprocess.Popen[Any]:
        """Starts a process on the host. Its pid is the pid of the command itself."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], **of_popen)

    def within(self, host: int, call: Callable[[], T]) -> T:
        """Runs `call` in a thread on the host, so that its sockets belong to the host. Exceptions are passed on."""
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                _enter(self.names[host])
                outcome.append(call())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]
        return outcome[0]

    def shape(self, host: int, link: Link) -> None:
        """Routes all further packets from the host through `link`."""
        rate = int(link.bytes_per_s)
        queue = int(link.queue_s * rate)
        self._tell(f"link {host} {link.delay_s * 1e6:.0f} {link.loss * 1e6:.0f} {rate} {queue}")

    def cut(self, source: int, target: int) -> None:
        """Drops all packets from `source` to `target`; the other direction stays open."""
        self._tell(f"cut {source} {target}")

    def heal(self, source: int, target: int) -> None:
        self._tell(f"heal {source} {target}")

    def isolate(self, host: int) -> None:
        """Cuts both directions between `host` and all other hosts."""
        for other in self._others(host):
            self.cut(host, other)
            self.cut(other, host)

    def rejoin(self, host: int) -> None:
        for other in self._others(host):
            self.heal(host, other)
            self.heal(other, host)

    def counts(self, host: int) -> PacketCounts:
        return PacketCounts(*map(int, self._tell(f"counts {host}").split()))

    def _others(self, host: int) -> list[int]:
        return [other for other in range(len(self.names)) if other != host]

    def _tell(self, line: str) -> str:
        assert self._wires.stdin is not None
        assert self._wires.stdout is not None
        with self._lock:
            self._wires.stdin.write(line + "\n")
            self._wires.stdin.flush()
            answer = self._wires.stdout.readline()
        if not answer.startswith("ok"):
            raise RuntimeError(f"the wires did not understand {line!r}: {answer!r}")
        return answer.removeprefix("ok").strip()


def missing_requirement() -> str | None:
    """Returns the missing requirement of this machine; None if networks can be created."""
    if shutil.which("ip") is None:
        return "needs ip of iproute2 (.ci/system-packages)"
    if not any(map(shutil.which, COMPILERS["C"])):
        return "needs a C compiler (.ci/system-packages)"
    try:
        os.close(_open_tun(f"mwprobe{os.getpid()}"))
    except OSError as error:
        return f"network devices cannot be made here ({_TUN}: {error.strerror}); needs CAP_NET_ADMIN"
    probe = f"moon-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here (ip netns add); needs CAP_SYS_ADMIN"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextlib.contextmanager
def network(num_hosts: int, *, mtu: int = 1500, congestion_control: str | None = None) -> Iterator[Network]:
    """Creates hosts with perfect links for the duration of the block. Their processes must end before it does."""
    names = [f"moon-{os.getpid()}-{host}" for host in range(num_hosts)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = _compiled(folder)
        fds = []
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            fds.append(_plug_in(host, name, mtu))
            stack.callback(os.close, fds[-1])
            if congestion_control is not None:
                _set_in(name, "net.ipv4.tcp_congestion_control", congestion_control)
        wires = subprocess.Popen(
            [str(program), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        stack.callback(_end, wires)
        yield Network(names, wires)


def _end(wires: subprocess.Popen[str]) -> None:
    wires.communicate()  # closes its stdin, which ends it


def _compiled(folder: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS["C"])))
    subprocess.run([compiler, "-O2", "-o", folder / "wires", _SOURCE], check=True)
    return folder / "wires"


def _plug_in(host: int, name: str, mtu: int) -> int:
    """Creates the host's only network device; returns its descriptor, for the packets in both directions."""
    device = f"mw{os.getpid()}x{host}"
    fd = _open_tun(device)
    try:
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "addr", "add", f"{NETWORK}.{host + 1}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "mtu", str(mtu), "txqueuelen", "10000", "up")
        _ip("-n", name, "link", "set", "lo", "up")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_tun(device: str) -> int:
    fd = os.open(_TUN, os.O_RDWR)
    try:
        request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(fd, _TUNSETIFF, request)
    except OSError:
        os.close(fd)
        raise
    return fd


def _set_in(name: str, key: str, value: str) -> None:
    path = "/proc/sys/" + key.replace(".", "/")
    _ip("netns", "exec", name, "sh", "-c", f"echo {value} > {path}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)
