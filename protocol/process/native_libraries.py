"""Finds or compiles the shared libraries of every package from C and C++ sources.

A wheel contains the libraries of portable C sources (`C_FLAGS`, setup.py), which are tried first. All others are
compiled on first use, once per source and compiler flags: in a checkout all sources, in an installed package those that
depend on the machine's instruction set (`-march=native`, once per processor: the engine's layers and attention).

A source is identified by its text and the text of the files that it includes by `#include "…"`, relative to the
includer. Compiled code is required: without it a process ends with one line that says what to install
(`CompilerError`). Only the engine has an alternative: torch.
"""

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.machine import cache_folder, processor

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
C_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",  # gives equal results on every processor
    "-fno-math-errno",
    "-fvisibility=hidden",
)
"""Compiler flags of sources that run on any processor of an architecture."""
COMPILERS = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++")}


class CompilerError(ConfigError):
    """There is no compiler, or the compilation failed."""


def shared_cache() -> Path | None:
    """Returns the user's folder of compiled libraries, or None if it cannot be created."""
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
    """Loads the library of `source` (C++ if it ends in .cpp, else C) from the wheel or from `folder`.

    If it is in neither, calls `compiling` and compiles it into `folder`. Without a folder it is compiled for this
    process only. Raises CompilerError.
    """
    packaged = packaged_library(source, flags)
    if "-march=native" not in flags and packaged.exists():
        with contextlib.suppress(OSError):  # the wheel was built for another C library
            return ctypes.CDLL(str(packaged))
    if folder is not None:
        return _load_cached(source, flags, folder, compiling)
    with tempfile.TemporaryDirectory() as own:  # once loaded, the file is no longer needed
        return _load_cached(source, flags, Path(own), compiling)


def packaged_library(source: Path, flags: Sequence[str]) -> Path:
    """Returns the path of a portable source's library in a wheel. The name changes with the source."""
    return source.with_name(_name(source, flags, platform.machine()))


def _name(source: Path, flags: Sequence[str], machine: str) -> str:
    texts = [path.read_text(encoding="utf-8") for path in with_included(source)]
    identity = "|".join((*texts, *flags, machine))
    digest = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    return f"{source.stem}-{digest}.so"


def _load_cached(source: Path, flags: Sequence[str], folder: Path, compiling: Callable[[], None] | None) -> ctypes.CDLL:
    library = folder / _name(source, flags, processor() if "-march=native" in flags else platform.machine())
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
    """Returns `source` and all files that it includes, directly or indirectly, each once."""
    found = [source.resolve()]
    for path in found:  # grows meanwhile
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            included = (path.parent / name).resolve()
            if included not in found:
                found.append(included)
    return found


def compile_library(source: Path, flags: Sequence[str], library: Path) -> None:
    """Compiles `source` into `library`. Raises CompilerError, or OSError if `library` cannot be written."""
    compiler = _compiler("C++" if source.suffix == ".cpp" else "C")
    # A unique temporary name, because several processes and threads may compile at once.
    partial = library.with_suffix(f".{os.getpid()}-{threading.get_native_id()}.partial")
    command = [compiler, *flags, "-fPIC", "-shared", str(source), "-lm", "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        "moonserve, which contains the compiled libraries"
    )


def c_fields(kind: type[Any], names: str) -> Iterator[tuple[str, type[Any]]]:
    """Yields entries for `_fields_` of a C structure: consecutive fields of one type. `names`: separated by spaces."""
    return ((name, kind) for name in names.split())
