"""Compilers for tests of compiled code. A test is skipped only if there is no compiler.

Knows no source. Source that does not compile although there is a compiler is a failure, not another reason to skip.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonserve.protocol.process.native_libraries import COMPILERS
from tests.patience import PATIENCE_S
from tests.processes import binary

STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")


def has_compiler(language: str = "C") -> bool:
    """True if there is a compiler for `language`, "C" or "C++"."""
    return any(map(shutil.which, COMPILERS[language]))


def need_compiler() -> None:
    if not has_compiler():
        pytest.skip("needs a C compiler (.ci/system-packages)")


def compile_strictly(compiler: str, source: Path, flags: Sequence[str], folder: Path) -> None:
    """Fails unless `compiler` ("gcc", "clang") accepts the source without a warning."""
    made = "-fsyntax-only" not in flags  # without output, clang warns about unused flags
    library = ["-fPIC", "-shared", "-o", str(folder / "strict.so")] if made else []
    # -Wconversion reports more in clang++ than in g++: the sign of every index of a C++ array.
    # -Wpsabi warns about functions that other libraries would call differently; none of these leaves its file.
    lenient = {"clang++": ["-Wno-sign-conversion"], "g++": ["-Wno-psabi"]}.get(compiler, [])
    command = [binary(compiler), *flags, *STRICT, *lenient, str(source), *library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
