"""The compiled core builds without complaint, and without a compiler Python does the work."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.pages import PagePool, PoolConfig, prototypes
from engine.pages.prototypes import FLAGS, SOURCE
from engine.pages.twin import PythonPages
from protocol import native
from tests.compilers import compile_strictly


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(compiler: str, tmp_path: Path) -> None:
    """Neither of the two, with every warning an error."""
    compile_strictly(compiler, SOURCE, FLAGS, tmp_path)


def test_without_a_compiler_python_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One warning in all, and the pool works."""
    monkeypatch.setattr(native.shutil, "which", lambda _name: None)
    monkeypatch.setattr(prototypes, "shared_cache", lambda: tmp_path)
    prototypes.compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            pools = [PagePool(PoolConfig(num_blocks=3)) for _ in range(2)]
    finally:
        prototypes.compiled.cache_clear()
    assert len(caplog.records) == 1
    for pool in pools:
        assert isinstance(pool._core, PythonPages)
        assert pool.allocate(1, 3) == [0, 1, 2]
