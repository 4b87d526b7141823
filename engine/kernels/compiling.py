"""How the engine's C++ is compiled and where its libraries are kept. Knows no kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.native import load_library

# Multiplications and additions may be fused, no more, so that a result does not depend on how a loop was cut. Not
# -ffast-math, which would reorder sums and make every thread of the process flush denormals once a library is loaded.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-pthread",
)


def load_kernels(
    source: Path,
    cache_folder: Path | None,
    compiling: Callable[[], None] | None = None,
    *,
    flags: Sequence[str] = FLAGS,
) -> ctypes.CDLL:
    """As `protocol.native.load_library`, kept in the engine's part of `cache_folder`. Raises CompilerError."""
    folder = None if cache_folder is None else cache_folder / "kernels"
    return load_library(source, flags, folder, compiling)
