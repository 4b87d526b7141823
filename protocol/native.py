"""Compiling a C file into a shared library, once per source, compiler flags and processor.

Its rule: compiled code is never required. Whoever cannot have it (`CompilerError`) has another way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from protocol.machine import cache_folder, processor

_TIMEOUT_S = 120.0


class CompilerError(Exception):
    """No compiler, or it refused."""


def shared_cache() -> Path | None:
    """Where this user keeps compiled libraries; None where nothing can be kept."""
    try:
        folder = cache_folder(os.environ, Path.home()) / "native"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or not writable
        return None
    return folder


def load_library(source: Path, flags: Sequence[str], folder: Path | None) -> ctypes.CDLL:
    """The library made from `source`, compiled into `folder` unless it is there already.

    None compiles for this process alone. Raises CompilerError.
    """
    if folder is not None:
        return _load_cached(source, flags, folder)
    with tempfile.TemporaryDirectory() as own:  # once loaded, the file is no longer needed
        return _load_cached(source, flags, Path(own))


def _load_cached(source: Path, flags: Sequence[str], folder: Path) -> ctypes.CDLL:
    identity = "|".join((source.read_text(encoding="utf-8"), *flags, processor()))
    name = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    library = folder / f"{source.stem}-{name}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            compile_library(source, flags, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(str(error)) from error


def compile_library(source: Path, flags: Sequence[str], library: Path) -> None:
    """Raises CompilerError, or OSError when `library` cannot be written."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CompilerError("no C compiler (cc, gcc or clang) is installed")
    # Under a name of its own first: several workers may start at once, and threads in each.
    partial = library.with_suffix(f".{os.getpid()}-{threading.get_native_id()}.partial")
    command = [compiler, *flags, "-fPIC", "-shared", str(source), "-o", str(partial)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{compiler} took more than {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise CompilerError(f"{compiler} failed: {done.stderr.strip()[:500]}")
    partial.replace(library)
