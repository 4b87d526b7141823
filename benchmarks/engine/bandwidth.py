"""How fast cores read memory: the floor under every decode step."""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from protocol.native import load_library, shared_cache

_BYTES = 512 << 20  # many times any cache
_LINE = 64
_ROUNDS = 5


def read_bytes_per_s(threads: int = 1) -> float:
    """The best of several rounds: in the processor's time where it is one thread, else on the clock of the wall, all
    threads together. Raises CompilerError."""
    library = load_library(
        Path(__file__).with_name("read.c"), ("-O3", "-march=native"), shared_cache()
    )
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = (ctypes.c_char * _BYTES).from_buffer(memory)
    ctypes.memset(view, 1, _BYTES)
    address, part = ctypes.addressof(view), _BYTES // threads
    clock = time.process_time if threads == 1 else time.perf_counter
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            begin = clock()
            list(
                pool.map(
                    lambda number: library.read_all(address + number * part, part // _LINE),
                    range(threads),
                )
            )
            times.append(clock() - begin)
    return _BYTES / min(times)
