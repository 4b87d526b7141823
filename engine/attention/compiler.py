"""Compiling a C file into a shared library, once per source, compiler flags and processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from engine.machine import processor

# Sums may be reordered and there are no infinities: what vectorised code needs. Not -ffast-math, which would make every
# thread of the process flush denormals when the library is loaded.
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
    "-ffinite-math-only",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
_TIMEOUT_S = 120.0


class CompilerError(Exception):
    """No compiler, or it refused."""


def load_library(source: Path, cache_folder: Path | None) -> ctypes.CDLL:
    """The library made from `source`, compiled into `cache_folder` unless it is there already; None compiles for this
    process alone. Raises CompilerError."""
    if cache_folder is not None:
        return _load_cached(source, cache_folder)
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is no longer needed
        return _load_cached(source, Path(folder))


def _load_cached(source: Path, folder: Path) -> ctypes.CDLL:
    identity = "|".join((source.read_text(encoding="utf-8"), *FLAGS, processor()))
    name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    library = folder / f"{source.stem}-{name}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(str(error)) from error


def _compile(source: Path, library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CompilerError("no C compiler (cc, gcc or clang) is installed")
    # Under a name of its own first: several workers may start at once.
    partial = library.with_suffix(f".{os.getpid()}.partial")
    command = [compiler, *FLAGS, str(source), "-o", str(partial)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{compiler} took more than {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise CompilerError(f"{compiler} failed: {done.stderr.strip()[:500]}")
    partial.replace(library)
