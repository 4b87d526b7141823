"""Which accelerator QEMU uses: KVM where it really runs a guest, else emulation.

/dev/kvm that opens proves nothing (nested virtualisation may accept a machine and never run it), so a
kernel is booted once, for a few seconds, and the answer is remembered for this host and this QEMU.
"""

import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PROBE_TIMEOUT_S = 15.0
QEMU = "qemu-system-x86_64"
ALIVE = "guest: alive"  # what init.sh says when it was asked to probe


@dataclass(frozen=True)
class Accelerator:
    name: str
    arguments: tuple[str, ...]


KVM = Accelerator("kvm", ("-accel", "kvm", "-cpu", "host"))
EMULATION = Accelerator("tcg", ("-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"))


def choose(cache: Path, probe_command: Callable[[Accelerator, Path], list[str]]) -> Accelerator:
    """KVM if its probe has succeeded here; `probe_command(accelerator, kernel_log)` boots and resets."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return EMULATION
    remembered = cache / "kvm.json"
    host = [platform.release(), subprocess.check_output([QEMU, "--version"], text=True)]
    if not remembered.exists() or (known := json.loads(remembered.read_text()))["host"] != host:
        known = {"host": host, "works": _works(cache / "probe.log", probe_command)}
        remembered.write_text(json.dumps(known))
    return KVM if known["works"] else EMULATION


def _works(log: Path, probe_command: Callable[[Accelerator, Path], list[str]]) -> bool:
    log.unlink(missing_ok=True)
    try:
        subprocess.run(
            probe_command(KVM, log), timeout=_PROBE_TIMEOUT_S, capture_output=True, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return False
    return log.exists() and ALIVE in log.read_text(errors="replace")
