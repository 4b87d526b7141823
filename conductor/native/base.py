"""What the loops in C share: where numpy's memory lies, and how a library is loaded."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import numpy.typing as npt

from protocol.native import C_FLAGS, CompilerError, load_library, shared_cache

_log = logging.getLogger(__name__)

POINTER, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_Place = ctypes.c_char * 0


@functools.cache
def library(name: str) -> ctypes.PyDLL | None:
    """NAME.c of this folder, loaded once in a process; the first call on a machine takes as long as the compiler does.
    None where there is no compiler: numpy does the same."""
    try:
        loaded = load_library(Path(__file__).with_name(f"{name}.c"), C_FLAGS, shared_cache())
    except CompilerError as error:
        _log.warning("compiled %s are not available, using numpy: %s", name, error)
        return None
    return ctypes.PyDLL(loaded._name, handle=loaded._handle)  # short calls keep the GIL


def pointers(name: str, fields: tuple[str, ...]) -> type[ctypes.Structure]:
    """The struct of C whose fields are the addresses of these columns."""
    return type(name, (ctypes.Structure,), {"_fields_": [(field, POINTER) for field in fields]})


def address_of(column: npt.NDArray[Any]) -> int:
    """Where a writable, contiguous column lies, for as long as it is kept. Raises TypeError for another one."""
    # A quarter of a microsecond, where numpy's own answer takes one and a half.
    memory: Any = column
    return ctypes.addressof(_Place.from_buffer(memory))
