"""The engine's C++ has nothing for a compiler to complain about."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine
from engine.kernels.library import FLAGS
from tests.compilers import compile_strictly

SOURCES = sorted(Path(engine.__file__).parent.rglob("*.cpp"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_compilers_have_nothing_to_complain_about(compiler: str, source: Path, tmp_path: Path) -> None:
    """Parsed and typed only: optimising takes ten times as long."""
    compile_strictly(compiler, source, (*FLAGS, "-fsyntax-only"), tmp_path)
