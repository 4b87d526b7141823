"""The C file compiles cleanly wherever it can, and is done without where it cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from protocol import native
from tests.compilers import compile_strictly, need_compiler
from transfer.native import library


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(compiler: str, tmp_path: Path) -> None:
    compile_strictly(compiler, library.SOURCE, library.FLAGS, tmp_path)


def test_without_a_compiler_the_twin_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert library.data_plane.__wrapped__().name == "python"
    assert "no C compiler" in caplog.text


def test_without_a_folder_to_keep_it_the_library_is_made_for_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert library.data_plane.__wrapped__().name == "native"
