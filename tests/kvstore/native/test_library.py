"""The C files compile cleanly wherever they can, and are done without where they cannot."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from kvstore.native import library
from kvstore.native.prototypes import FLAGS, HEAP_SOURCE, METADATA_SOURCE
from kvstore.native.twin import PythonKeyIndex, PythonKeyMap, PythonRankHeap
from protocol import native

STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")


@pytest.mark.parametrize("source", [METADATA_SOURCE, HEAP_SOURCE], ids=lambda path: path.name)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(
    compiler: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler}")
    monkeypatch.setattr(native.shutil, "which", lambda _name: found)
    native.compile_library(source, (*FLAGS, *STRICT), tmp_path / "strict.so")


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
    made = library.key_index(), library.key_map(), library.rank_heap()
    assert tuple(map(type, made)) == (PythonKeyIndex, PythonKeyMap, PythonRankHeap)
