"""Both cores of a pool, for tests that both must pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.pages.base import PageCore, PoolConfig
from engine.pages.native import NativePages
from engine.pages.prototypes import PagesLibrary, compiled
from engine.pages.twin import PythonPages
from tests.compilers import need_compiler

MakeCore = Callable[[PoolConfig], PageCore]


@pytest.fixture(scope="session")
def library() -> PagesLibrary:
    need_compiler()
    found = compiled()
    assert found is not None
    return found


@pytest.fixture(params=["native", "python"])
def make_core(request: pytest.FixtureRequest) -> MakeCore:
    if request.param == "python":
        return PythonPages
    library: PagesLibrary = request.getfixturevalue("library")
    return lambda config: NativePages(library, config)
