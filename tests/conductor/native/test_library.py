"""The loops in C compile without a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from conductor.native import base
from tests.compilers import compile_strictly

SOURCES = sorted(Path(base.__file__).parent.glob("*.c"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(
    compiler: str, source: Path, tmp_path: Path
) -> None:
    compile_strictly(compiler, source, base.FLAGS, tmp_path)
