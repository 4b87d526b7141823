"""The compiled data plane and its Python twin, for tests that both must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compilers import need_compiler
from transfer.native import DataPlane
from transfer.native.library import NativeDataPlane, PythonDataPlane


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(params=["native", "python"])
def plane(request: pytest.FixtureRequest, compiled: Path) -> DataPlane:
    if request.param == "python":
        return PythonDataPlane()
    need_compiler()
    return NativeDataPlane(compiled)
