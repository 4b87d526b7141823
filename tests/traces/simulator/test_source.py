"""The digest of a module's source follows imports: near, far, inside functions, and no further than the project."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from traces.simulator import many
from traces.simulator.many import source_digest


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`top` imports `middle` in a function, `middle` imports `bottom` from the package, and json."""
    package = tmp_path / "madeup"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "top.py").write_text("def run():\n    import madeup.middle\n")
    (package / "middle.py").write_text("import json\nfrom madeup import bottom\n")
    (package / "bottom.py").write_text("VALUE = 1\n")
    (package / "other.py").write_text("VALUE = 1\n")
    for name in [each for each in sys.modules if each.split(".")[0] == "madeup"]:
        monkeypatch.delitem(sys.modules, name)  # another test's, which lay elsewhere
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(many, "_PACKAGES", frozenset({"madeup"}))
    return package


@pytest.mark.parametrize("name", ["top", "middle", "bottom"])
def test_a_change_of_anything_imported_is_another_digest(project: Path, name: str) -> None:
    before = source_digest("madeup.top")
    with (project / f"{name}.py").open("a") as file:
        file.write("MORE = 2\n")
    assert source_digest("madeup.top") != before


def test_what_is_not_imported_does_not_count(project: Path) -> None:
    before = source_digest("madeup.top")
    (project / "other.py").write_text("VALUE = 2\n")
    assert source_digest("madeup.top") == before


def test_the_simulator_s_digest_covers_the_conductor_and_the_stores() -> None:
    """Whoever changes a policy simulates again."""
    names = set()
    waiting = ["traces.simulator.run"]
    while waiting:
        name = waiting.pop()
        path = many._path_of(name)
        if path is None or name in names:
            continue
        names.add(name)
        found = many._imports(path.read_bytes())
        waiting += [each for each in found if each.split(".")[0] in many._PACKAGES]
    assert {"conductor.state", "conductor.policies.global_cache_aware"} <= names
    assert {"kvstore.catalog", "traces.simulator.batch", "protocol.profile"} <= names
    assert not any(name.startswith(("traces.reports", "gateway", "engine")) for name in names)
