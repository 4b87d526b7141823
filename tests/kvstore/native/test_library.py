"""The C files compile cleanly wherever they can, and are done without where they cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstore.native import library, reader
from kvstore.native.twin import PythonKeyIndex, PythonKeyMap, PythonRankHeap
from protocol import native
from protocol.errors import Incompatible
from protocol.native import C_FLAGS
from tests.compilers import compile_strictly

SOURCES = sorted(Path(library.__file__).parent.glob("*.c"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(
    compiler: str, source: Path, tmp_path: Path
) -> None:
    compile_strictly(compiler, source, C_FLAGS, tmp_path)


def test_without_a_compiler_python_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        found = library.compiled.__wrapped__()
    assert found is None
    assert "no C compiler" in caplog.text
    monkeypatch.setattr(library, "compiled", lambda: found)
    monkeypatch.setattr(reader, "compiled", lambda: found)
    with pytest.raises(Incompatible):
        reader.MappedReader(library.key_index().memory, memoryview(b""))
    made = library.key_index(), library.key_map(), library.rank_heap()
    assert tuple(map(type, made)) == (PythonKeyIndex, PythonKeyMap, PythonRankHeap)
