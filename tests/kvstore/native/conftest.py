"""The compiled structures and their Python twins, for tests that both must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.native.base import Allocate, KeyMap, RankHeap, Retire, anonymous, dropped
from kvstore.native.compiled import NativeKeyIndex, NativeKeyMap, NativeRankHeap
from kvstore.native.layout import PublishedIndex
from kvstore.native.prototypes import HeapLibrary, MetadataLibrary
from kvstore.native.twin import PythonKeyIndex, PythonKeyMap, PythonRankHeap
from tests.compilers import need_compiler

Libraries = tuple[MetadataLibrary, HeapLibrary]


@dataclass(frozen=True, slots=True)
class Kind:
    """One implementation of everything."""

    libraries: Libraries | None

    def key_index(self, allocate: Allocate = anonymous, retire: Retire = dropped) -> PublishedIndex:
        if self.libraries is None:
            return PythonKeyIndex(allocate)
        return NativeKeyIndex(self.libraries[0], allocate, retire)

    def key_map(self) -> KeyMap:
        return PythonKeyMap() if self.libraries is None else NativeKeyMap(self.libraries[0])

    def rank_heap(self) -> RankHeap:
        return PythonRankHeap() if self.libraries is None else NativeRankHeap(self.libraries[1])


MakeKind = Callable[[str], Kind]


@pytest.fixture(scope="session")
def make_kind(tmp_path_factory: pytest.TempPathFactory) -> MakeKind:
    """By name, native or python. Skips the test where it cannot be had."""
    folder: Path = tmp_path_factory.mktemp("native")

    def make(name: str) -> Kind:
        if name == "python":
            return Kind(None)
        need_compiler()
        return Kind((MetadataLibrary(folder), HeapLibrary(folder)))

    return make


@pytest.fixture(params=["native", "python"])
def kind(request: pytest.FixtureRequest, make_kind: MakeKind) -> Kind:
    return make_kind(request.param)
