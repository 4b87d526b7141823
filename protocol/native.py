"""The compiled part of every package: a shared library from a C or C++ file.

A wheel brings the libraries of portable C sources (`C_FLAGS`, setup.py), which are looked for first. Everything else is
compiled on first use, once per source, compiler flags and processor: in a checkout all sources, in an installed package
those whose code depends on the machine's instruction set (`-march=native`: the engine's layers and attention).

A source is its text and that of the files it includes by `#include "…"`, wherever they lie relative to the includer.
Its rule: compiled code is required, so a process that can have none of it ends with one line that says what to install
(`CompilerError`). Only the engine has another way: torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import ConfigError
from protocol.machine import cache_folder, processor

_TIMEOUT_S = 120.0
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
C_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",  # the same numbers on every processor
    "-fno-math-errno",
    "-fvisibility=hidden",
)
"""For sources that run on any processor of an architecture."""
COMPILERS = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++")}


class CompilerError(ConfigError):
    """No compiler, or it refused."""


def shared_cache() -> Path | None:
    """Where this user keeps compiled libraries; None where nothing can be kept."""
    try:
        folder = cache_folder(os.environ, Path.home()) / "native"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or not writable
        return None
    return folder


def load_library(
    source: Path,
    flags: Sequence[str],
    folder: Path | None,
    compiling: Callable[[], None] | None = None,
) -> ctypes.CDLL:
    """The library made from `source` (C, or C++ where it ends in .cpp): that of the wheel, or compiled into `folder`
    unless it is there already; `compiling` is called before that.

    None compiles for this process alone. Raises CompilerError.
    """
    packaged = packaged_library(source, flags)
    if "-march=native" not in flags and packaged.exists():
        with contextlib.suppress(OSError):  # of another C library than this machine's
            return ctypes.CDLL(str(packaged))
    if folder is not None:
        return _load_cached(source, flags, folder, compiling)
    with tempfile.TemporaryDirectory() as own:  # once loaded, the file is no longer needed
        return _load_cached(source, flags, Path(own), compiling)


def packaged_library(source: Path, flags: Sequence[str]) -> Path:
    """Where a wheel has the library of a portable source. A changed source has another name, so none is out of date."""
    return source.with_name(_name(source, flags, platform.machine()))


def _name(source: Path, flags: Sequence[str], machine: str) -> str:
    texts = [path.read_text(encoding="utf-8") for path in with_included(source)]
    identity = "|".join((*texts, *flags, machine))
    digest = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    return f"{source.stem}-{digest}.so"


def _load_cached(source: Path, flags: Sequence[str], folder: Path, compiling: Callable[[], None] | None) -> ctypes.CDLL:
    library = folder / _name(source, flags, processor())
    try:
        if not library.exists():
            if compiling is not None:
                compiling()
            folder.mkdir(parents=True, exist_ok=True)
            compile_library(source, flags, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(str(error)) from error


def with_included(source: Path) -> list[Path]:
    """`source`, then the files that it includes and those that they include, each once."""
    found = [source.resolve()]
    for path in found:  # grows meanwhile
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            included = (path.parent / name).resolve()
            if included not in found:
                found.append(included)
    return found


def compile_library(source: Path, flags: Sequence[str], library: Path) -> None:
    """Raises CompilerError, or OSError when `library` cannot be written."""
    compiler = _compiler("C++" if source.suffix == ".cpp" else "C")
    # Under a name of its own first: several workers may start at once, and threads in each.
    partial = library.with_suffix(f".{os.getpid()}-{threading.get_native_id()}.partial")
    command = [compiler, *flags, "-fPIC", "-shared", str(source), "-lm", "-o", str(partial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{compiler} took more than {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise CompilerError(f"{compiler} failed: {done.stderr.strip()[:500]}")
    partial.replace(library)


def _compiler(language: str) -> str:
    names = COMPILERS[language]
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompilerError(
        f"no {language} compiler ({names[0]}, {names[1]} or {names[2]}) is installed: install one, or a wheel of "
        "moonserve, which brings what is compiled"
    )
