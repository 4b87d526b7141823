"""What compiled code and caches depend on: the name of the processor, and where caches go."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path


def processor() -> str:
    """The processor's model, as precisely as the platform tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "|".join(sorted(names)) or platform.machine()


def cache_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Where compiled kernels and timing profiles are kept, by the XDG base directory specification."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home / ".cache") / "moonserve"
