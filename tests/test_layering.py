"""Imports point in one direction (ARCHITECTURE.md, code map), and the purity rules of `state.py` hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonserve.__main__ import SERVERS, VERBS

ROOT = Path(__file__).parent.parent

ALLOWED = {
    "protocol": set(),
    "transfer": {"protocol"},
    "kvstore": {"protocol", "transfer"},
    "engine": {"protocol"},
    "conductor": {"protocol", "kvstore.directory"},
    "worker": {"protocol", "engine", "transfer", "kvstore"},
    "prefill_worker": {"protocol", "engine", "transfer", "kvstore", "worker"},
    "decode_worker": {"protocol", "engine", "transfer", "kvstore", "worker"},
    "gateway": {"protocol"},
    "traces": {
        "protocol",
        # The pure parts, which the simulator drives in virtual time.
        *(f"conductor.{part}" for part in ("state", "limits", "events", "decision", "policies")),
        *(f"conductor.{part}" for part in ("admission", "cost", "fairness", "roles")),
        *(f"kvstore.{part}" for part in ("catalog", "disk.base", "eviction", "native", "stored")),
        "kvstore.directory",
    },
    "models": set(),
}
PACKAGES = {*ALLOWED, "deploy", "benchmarks", "tests"}

# `state.py` decides. Waiting, reading clocks and drawing random numbers belong to its shell.
IMPURE = {"asyncio", "socket", "time", "random", "secrets", "torch", "grpc", "threading", "os"}
SERVING = {"fastapi", "starlette", "uvicorn"}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def sources(package: str) -> list[Path]:
    return [p for p in (ROOT / package).rglob("*.py") if "pb" not in p.parts]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_its_layer_allows(package: str) -> None:
    permitted = {package, *ALLOWED[package]}
    for path in sources(package):
        for module in imports_of(path):
            if module.split(".")[0] not in PACKAGES:
                continue
            allowed = any(module == p or module.startswith(p + ".") for p in permitted)
            assert allowed, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize(
    ("unwanted", "allowed_in"),
    [({"torch"}, {"engine", "models", "tests", "benchmarks"}), (SERVING, {"gateway", "tests"})],
    ids=["torch", "serving of HTTP"],
)
def test_a_library_is_imported_only_where_it_belongs(unwanted: set[str], allowed_in: set[str]) -> None:
    for path in (path for package in PACKAGES - allowed_in for path in sources(package)):
        assert not {m.split(".")[0] for m in imports_of(path)} & unwanted, path


def test_state_files_are_pure() -> None:
    files = [path for package in PACKAGES for path in sources(package) if path.name == "state.py"]
    assert files
    for path in files:
        assert not {m.split(".")[0] for m in imports_of(path)} & IMPURE, path


def test_the_proto_folder_is_no_python_package() -> None:
    """The folder `proto` has no Python files: proto-plus, which ray[default] installs, is imported as `proto`."""
    assert not list((ROOT / "proto").glob("*.py"))


def test_who_computes_nothing_starts_without_torch_and_without_redis_where_there_is_none() -> None:
    """Processes that compute nothing import neither torch nor redis at start; that would take longer than all else."""
    own = ("gateway", "conductor", "store", "directory")
    places = ["moonserve.__main__", VERBS["serve"][0], *(place for verb in own for place in SERVERS[verb])]
    imports = "; ".join(f"import {place.partition(':')[0]}" for place in places)
    unwanted = "torch transformers redis matplotlib"
    show = f"import sys; print(*sorted(set('{unwanted}'.split()) & set(sys.modules)))"
    command = [sys.executable, "-c", f"{imports}; {show}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []
