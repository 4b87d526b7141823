"""The structures of `base` as this machine can have them: compiled where there is a compiler, else their twins."""

from __future__ import annotations

import functools
import logging

from kvstore.native.base import Allocate, KeyMap, RankHeap, Retire, anonymous, dropped
from kvstore.native.compiled import NativeKeyIndex, NativeKeyMap, NativeRankHeap
from kvstore.native.layout import PublishedIndex
from kvstore.native.prototypes import HeapLibrary, MetadataLibrary
from kvstore.native.twin import PythonKeyIndex, PythonKeyMap, PythonRankHeap
from protocol.native import CompilerError, shared_cache

_log = logging.getLogger(__name__)


def key_index(allocate: Allocate = anonymous, retire: Retire = dropped) -> PublishedIndex:
    """An empty index in memory from `allocate`; `retire` gets what it has outgrown."""
    libraries = compiled()
    if libraries is None:
        return PythonKeyIndex(allocate)
    return NativeKeyIndex(libraries[0], allocate, retire)


def key_map() -> KeyMap:
    libraries = compiled()
    return PythonKeyMap() if libraries is None else NativeKeyMap(libraries[0])


def rank_heap() -> RankHeap:
    libraries = compiled()
    return PythonRankHeap() if libraries is None else NativeRankHeap(libraries[1])


@functools.cache
def compiled() -> tuple[MetadataLibrary, HeapLibrary] | None:
    """Those of this process: code, like an imported module, so they are loaded once and have no state.

    The first call on a machine takes as long as the compiler does; a node makes it when it starts.
    """
    try:
        folder = shared_cache()
        return MetadataLibrary(folder), HeapLibrary(folder)
    except CompilerError as error:
        _log.warning("compiled metadata is not available, using Python: %s", error)
        return None
