"""Runs jobs in a guest: builds its QEMU command line, boots it, and locks so that only one guest runs at a time.

Does not know what a job does. A job is a shell command that runs at the repository's root with the same Python
interpreter as the caller. The files it leaves in /run/job (its results folder) remain afterwards.
"""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from moonserve.protocol.process.native_libraries import shared_cache
from tests.rdma.guest import initramfs, kernel
from tests.rdma.guest.kernel import GuestUnavailable

REPOSITORY = Path(__file__).resolve().parents[3]
TIMED_OUT = 124  # exit status of timeout(1)

QEMU = "qemu-system-x86_64"
_KERNEL_LOG = "kernel.log"
_HERE = Path(__file__).parent
_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
_NEEDED = {
    QEMU: "qemu-system-x86",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "setpriv": "util-linux",
}
_KERNEL_WORDS = (
    "console=ttyS0 quiet panic=-1 reboot=t net.ifnames=0 random.trust_cpu=on "
    # A busy host delays the emulated timers. Without these options the kernel gives up the TSC and reads its clock
    # from the emulated HPET, which is three times slower, or considers the timer itself broken.
    "no_timer_check tsc=reliable "
    # Features that are expensive under emulation and protect nothing here.
    "mitigations=off init_on_alloc=0 nokaslr audit=0 apparmor=0"
)


class GuestFailed(Exception):
    """Raised if the guest ends without the exit code of the job."""


_MAX_STARTS = 2
"""A guest that ends without the exit code of its job is started again: the emulator ended once in hundreds
of runs for no known reason. What ends the job itself ends it again."""


def _command(results: Path) -> list[str]:
    """Returns the QEMU command line. Builds the initramfs if it is not cached."""
    if reason := why_unavailable():
        raise GuestUnavailable(reason)
    found = kernel.find(cache_folder())
    archive = initramfs.build(kernel.in_load_order(found.modules), cache_folder())
    kept = cache_folder() / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    # Libraries for any processor: the guest needs minutes to compile one.
    if (compiled := shared_cache()) is not None:
        unfinished = shutil.ignore_patterns("*.partial")
        shutil.copytree(compiled, kept / "moonserve" / "native", ignore=unfinished, dirs_exist_ok=True)
    return [
        # The guest ends with the process that started it, even if that process is killed.
        *("setpriv", "--pdeathsig", "KILL", QEMU),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-M", "q35"),
        # Always emulated: nested virtualisation may accept a machine and never run it.
        *("-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2", "-m", "4096"),
        *("-kernel", str(found.image), "-initrd", str(archive)),
        *("-append", _KERNEL_WORDS, "-serial", f"file:{results / _KERNEL_LOG}"),
        *("-device", "virtio-serial-pci", "-chardev", "file,id=said,path=/dev/stdout"),
        *("-device", "virtserialport,chardev=said,name=job"),
        *_share("root", Path("/"), ",readonly=on,multidevs=remap"),
        *_share("job", results),
        *_share("cache", kept),
        *_nic(0),
        *_nic(1),
        # A port that accepts every packet. Without one, QEMU's hub would hold a sender's packets, and with them its
        # queue pairs, until the rail that is down comes up, which no real network does.
        *("-netdev", "user,id=drain,restrict=on,ipv6=off", "-netdev", "hubport,id=rail2,hubid=0,netdev=drain"),
    ]


def _share(tag: str, folder: Path, options: str = "") -> list[str]:
    path = str(folder).replace(",", ",,")  # QEMU escapes commas this way
    return [
        *("-fsdev", f"local,id={tag},path={path},security_model=none{options}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    ]


def _nic(rail: int) -> list[str]:
    return [
        *("-netdev", f"hubport,id=rail{rail},hubid=0"),
        *("-device", f"virtio-net-pci,netdev=rail{rail},mac=52:54:00:77:0{rail}:01"),
    ]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moonserve" / "guest"


def why_unavailable() -> str | None:
    """Returns why no guest can run here, or None. Boots and downloads nothing."""
    if "MOONSERVE_GUEST" in os.environ:
        return "this is the guest"
    for program, package in _NEEDED.items():
        if not shutil.which(program, path=f"{os.environ['PATH']}:/sbin:/usr/sbin"):
            return f"{program} is not installed (package {package})"
    if not any(_PYVERBS.glob(f"device.cpython-{sys.version_info[0]}{sys.version_info[1]}-*.so")):
        return f"no pyverbs for Python {sys.version_info[0]}.{sys.version_info[1]} (package python3-pyverbs)"
    try:
        kernel.find(cache_folder())
    except GuestUnavailable as error:
        return str(error)
    return None


def run(job: str, results: Path, timeout_s: float, say: Callable[[str], None]) -> int:
    """Boots the guest, runs the shell command `job`, and returns its exit code (TIMED_OUT if it was killed).

    `say` is called with the job's output as it arrives. `results` is /run/job in the guest.
    """
    results.mkdir(parents=True, exist_ok=True)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one guest per host: waits for another run to end
        command = _command(results)
        _lay_out(job, results)
        for _ in range(_MAX_STARTS):
            timed_out, qemu_code = _boot(command, results / "qemu.log", timeout_s, say)
            if timed_out:
                say(f"guest: killed after {timeout_s:.0f} s\n")
                return TIMED_OUT
            if (results / "exit_code").exists():
                return int((results / "exit_code").read_text())
            logs = [results / "qemu.log", results / _KERNEL_LOG]
            last = "".join(f"\n{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists())
            say(f"guest: ended without the job's exit code, QEMU with {qemu_code};{last}\n")
    raise GuestFailed(f"the guest ended without the job's exit code, QEMU with {qemu_code};{last}")


def _lay_out(job: str, results: Path) -> None:
    (results / "exit_code").unlink(missing_ok=True)
    shutil.copyfile(_HERE / "start.sh", results / "start.sh")
    environment = {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/run/tmp",
        "TMPDIR": "/run/tmp",
        "XDG_CACHE_HOME": "/run/cache",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONPATH": "/run/python",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "MOONSERVE_GUEST": "1",
    }
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    (results / "job.sh").write_text(
        f"cd {shlex.quote(str(REPOSITORY))}\nexec env -i {assignments} /bin/sh -c {shlex.quote(job)}\n"
    )


def _boot(command: Sequence[str], complaints: Path, timeout_s: float, say: Callable[[str], None]) -> tuple[bool, int]:
    """Returns whether the guest had to be killed, and QEMU's exit code, negative for a signal."""
    with (
        complaints.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # gives it its own share of the processor (sched(7), autogroups)
        ) as qemu,
    ):
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            qemu.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.start()
        try:
            assert qemu.stdout is not None
            while part := os.read(qemu.stdout.fileno(), 65536):
                say(part.decode(errors="replace"))
        except BaseException:
            qemu.kill()
            raise
        finally:
            timer.cancel()
    return killed.is_set(), qemu.returncode
