"""Tests of compiling C files: each becomes a library once, failures are CompilerErrors, and ours give no warnings."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonserve.protocol.process import native_libraries
from moonserve.protocol.process.native_libraries import C_FLAGS, CompilerError, load_library
from tests.compilers import compile_strictly, has_compiler
from tests.processes import ROOT

FOLDERS = ("conductor/prediction/native", "kvstore/native", "transfer/native")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.c"))]
pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler (.ci/system-packages)")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_c_files_of_all_components_compile_without_warnings(compiler: str, path: Path, tmp_path: Path) -> None:
    compile_strictly(compiler, path, C_FLAGS, tmp_path)


def source(folder: Path, value: int) -> Path:
    path = folder / f"answer{value}.c"
    path.write_text(f"int answer(void) {{ return {value} + PLUS; }}\n")
    return path


def test_library_is_compiled_once_per_source_and_flags(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = source(tmp_path, 40)
    assert load_library(path, ["-DPLUS=2"], cache).answer() == 42
    [made] = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert load_library(path, ["-DPLUS=2"], cache).answer() == 42
    assert [made] == list(cache.iterdir())
    assert made.stat().st_mtime_ns == before
    assert load_library(path, ["-DPLUS=3"], cache).answer() == 43
    assert len(list(cache.iterdir())) == 2


def test_change_of_an_included_file_recompiles(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "sum.c"
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "outer.h").write_text('#pragma once\n#include "inner.h"\n')
    (tmp_path / "parts" / "inner.h").write_text('#define VALUE 1\n#include "outer.h"\n')
    path.write_text('#include <stdint.h>\n#include "parts/outer.h"\nint sum(void) { return VALUE; }\n')
    assert load_library(path, [], cache).sum() == 1
    (tmp_path / "parts" / "inner.h").write_text("#define VALUE 2\n")
    assert load_library(path, [], cache).sum() == 2
    assert len(list(cache.iterdir())) == 2


@pytest.mark.skipif(not has_compiler("C++"), reason="needs a C++ compiler (.ci/system-packages)")
def test_cpp_file_uses_cpp_compiler_and_reports_compilation(tmp_path: Path) -> None:
    path = tmp_path / "twice.cpp"
    path.write_text(
        'template <int N> int times(int x) { return N * x; }\nextern "C" int twice(int x) { return times<2>(x); }\n'
    )
    compilations: list[str] = []
    for _ in range(2):
        library = load_library(path, [], tmp_path / "cache", lambda: compilations.append("compiling"))
        assert library.twice(21) == 42
    assert compilations == ["compiling"]


def test_library_without_cache_folder_is_compiled_for_this_process(tmp_path: Path) -> None:
    assert load_library(source(tmp_path, 1), ["-DPLUS=0"], None).answer() == 1


def test_compiler_error_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CompilerError is raised if the source is invalid, the folder cannot be created, or there is no compiler."""
    path = source(tmp_path, 1)
    with pytest.raises(CompilerError, match="PLUS"):
        load_library(path, [], tmp_path)
    with pytest.raises(CompilerError):
        load_library(path, ["-DPLUS=0"], path / "cache")
    monkeypatch.setattr(native_libraries.shutil, "which", lambda _name: None)
    with pytest.raises(CompilerError, match="no C compiler"):
        load_library(path, ["-DPLUS=0"], tmp_path)


def test_concurrent_compilations_of_one_file_succeed(tmp_path: Path) -> None:
    path = source(tmp_path, 5)

    def load(_: int) -> int:
        answer: int = load_library(path, ["-DPLUS=5"], tmp_path / "cache").answer()
        return answer

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(load, range(3)))
    assert answers == [10, 10, 10]
