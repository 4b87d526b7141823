"""Rows of results (passed, failed or skipped), and their output as a table and as JSON, with the machine."""

import platform
import shutil
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu_check.context import Ceilings
from benchmarks.harness.measure import table

# Rows of the table: passed, failed or skipped, each with its figure and its reason.

Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one verification."""

    name: str
    status: Status
    found: str = ""
    asked: str = ""  # the requirement
    reason: str = ""  # of a failure or a skip
    figures: Mapping[str, float] = field(default_factory=dict)


def skipped(name: str, reason: str) -> Row:
    return Row(name=name, status="skipped", reason=reason)


def failed(name: str, error: Exception) -> Row:
    """Returns the row of an error, whose traceback goes to stderr."""
    traceback.print_exception(error)
    text = str(error).strip() or type(error).__name__
    return Row(name=name, status="fail", reason=f"{type(error).__name__}: {text.splitlines()[0]}")


def guarded(name: str, verify: Callable[[str], Row]) -> Row:
    """Returns the row of `verify(name)`. An exception becomes a failed row of that name, and the others still run."""
    try:
        return verify(name)
    except Exception as error:  # compilers, drivers and devices have exceptions of their own
        return failed(name, error)


def at_least(name: str, value: float, bar: float, found: str, asked: str) -> Row:
    """Returns a row that passes if `value` is at least `bar`."""
    reason = "" if value >= bar else f"{value:.3g} is below {bar:.3g}"
    return _compared(name, value, bar, found, asked, reason)


def at_most(name: str, value: float, bar: float, found: str, asked: str) -> Row:
    """Returns a row that passes if `value` is at most `bar`; NaN fails."""
    reason = "" if value <= bar else f"{value:.3g} is above {bar:.3g}"
    return _compared(name, value, bar, found, asked, reason)


def _compared(name: str, value: float, bar: float, found: str, asked: str, reason: str) -> Row:
    return Row(
        name=name,
        status="fail" if reason else "pass",
        found=found,
        asked=asked,
        reason=reason,
        figures={"value": value, "bar": bar},
    )


# Describes the machine, for the head of the table.


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns the names and versions of hardware and software."""
    found = {
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **{name: _version(name) for name in ("triton", "transformers")},
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found["gpu"] = f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
        found["gpu memory"] = f"{gpu.total_memory / 2**30:.0f} GiB"
        found["compute capability"] = f"{gpu.major}.{gpu.minor}"
        found["driver"] = _driver()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown (no nvidia-smi)"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped"


def as_table(machine: Mapping[str, str], ceilings: Ceilings, rows: Sequence[Row]) -> str:
    lines = [f"- {name}: {value}" for name, value in machine.items()]
    lines.append(
        f"- reached here: copies {ceilings.copy_bytes_per_s / 1e9:,.0f} GB/s (read and written), "
        f"bfloat16 products {ceilings.flops_per_s / 1e12:,.1f} TFLOP/s"
    )
    cells = [(row.name, row.status, row.found, row.asked, row.reason) for row in rows]
    headers = ("what", "", "found", "asked", "why")
    return "\n".join((*lines, "", table(headers, cells), "", summary(rows)))


def as_document(machine: Mapping[str, str], ceilings: Ceilings, rows: Sequence[Row], taken_s: float) -> dict[str, Any]:
    return {
        "machine": dict(machine),
        "ceilings": asdict(ceilings),
        "rows": [asdict(row) for row in rows],
        "seconds": taken_s,
    }
