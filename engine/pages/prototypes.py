"""The compiled functions and the structures they share with Python. Knows nothing about what they do."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

from protocol.native import CompilerError, load_library, shared_cache

SOURCE = Path(__file__).with_name("pages.c")
FLAGS = ("-std=gnu11", "-O2", "-fvisibility=hidden", "-pthread")
NUM_STATS = 21

_log = logging.getLogger(__name__)
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
_uint32, _uint64 = ctypes.c_uint32, ctypes.c_uint64


class Setting(ctypes.Structure):
    """`Setting` of pool.h."""

    _fields_ = tuple(
        (name, _uint64)
        for name in (
            "num_blocks",
            "max_blocks",
            "max_requests",
            "reserved_ppm",
            "policy",
            "seed",
            "prefault",
        )
    )


class WishState(ctypes.Structure):
    """`Wish` of pool.h."""

    _fields_ = (
        ("handle", _uint64),
        ("count", _uint32),
        ("priority", _uint32),
        ("room", _uint32),
        ("flags", _uint32),
    )


class EvictedState(ctypes.Structure):
    """`Evicted` of pool.h."""

    _fields_ = (("handles", _pointer), ("room", _int64), ("count", _int64))
    count: int


Function = Callable[..., int]


class PagesLibrary:
    """pages.c: `_long` calls wait for the lock without the GIL; `_short` ones keep the GIL and do not wait."""

    def __init__(self, folder: Path | None) -> None:
        library = load_library(SOURCE, FLAGS, folder)
        self._long = library
        self._short = ctypes.PyDLL(library._name, handle=library._handle)
        self.create = self._declare("create", _pointer, _pointer)
        self.destroy = self._declare("destroy", None, _pointer)
        self._declare_requests()
        self._declare_pool()

    def _declare_requests(self) -> None:
        wish = "allocate", _int64, _pointer, _pointer, _pointer
        self.allocate, self.try_allocate = self._declare(*wish), self._declare(*wish, short=True)
        self.try_allocate_plain = self._declare_quick("allocate_plain", short=True)
        batch = _pointer, _pointer, _int64
        self.allocate_all = self._declare(
            "allocate_all", _int64, *batch, _pointer, _uint32, _uint32, _pointer
        )
        self.free = self._declare_quick("free")
        self.try_free = self._declare_quick("free", short=True)
        self.total = self._declare("total", _int64, _pointer, _int64, short=True)
        self.free_all = self._declare("free_all", _int64, *batch)
        self.mark = self._declare_quick("mark")
        self.try_mark = self._declare_quick("mark", short=True)
        self.reserve = self._declare("reserve", _int64, _pointer, _pointer)
        self.hand_over = self._declare("hand_over", _int64, _pointer, _uint64, _uint64, _uint32)

    def _declare_pool(self) -> None:
        self.grow = self._declare("grow", _int64, _pointer, _uint64)
        self.shrink = self._declare("shrink", _int64, _pointer, _uint64, _pointer)
        self.table = self._declare("table", _int64, _pointer, _uint64, _pointer, _int64)
        self.follow = self._declare("follow", None, _pointer, _uint32, _int64, _pointer)
        self.rank = self._declare("rank", _int64, _pointer, _uint64, _uint32)
        self.set_barrier = self._declare("set_barrier", None, _pointer, _int64)
        self.stats = self._declare("stats", None, *3 * (_pointer,))
        self.check = self._declare("check", _int64, _pointer)

    def _declare(
        self, name: str, result: type | None, *arguments: type, short: bool = False
    ) -> Function:
        function = getattr(self._short if short else self._long, f"pages_{name}")
        function.argtypes, function.restype = arguments, result
        return function  # type: ignore[no-any-return]

    def _declare_quick(self, name: str, *, short: bool = False) -> Function:
        """Without types of arguments, since looking at these takes half of a call: the first is a `c_void_p`, and of
        each integer the low 32 bits are passed."""
        function = getattr(self._short if short else self._long, f"pages_{name}")
        function.restype = _int64
        return function  # type: ignore[no-any-return]


@functools.cache
def compiled() -> PagesLibrary | None:
    """That of this process, loaded once: code, like an imported module. None where there is no compiler."""
    try:
        return PagesLibrary(shared_cache())
    except CompilerError as error:
        _log.warning("the compiled page pool is not available, using Python: %s", error)
        return None
