"""Every guarantee on the store's documentation page names existing tests."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "store-guarantees.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_guarantee_names_existing_tests() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| **", "| promise"))]
    assert len(promises) > 50
    silent = [row for row in promises if not NAMED.search(row)]
    assert not silent
    missing = [f"{path}::{test}" for path, test in NAMED.findall("\n".join(promises)) if test not in names_in(path)]
    assert not missing


def names_in(path: str) -> set[str]:
    """Returns the functions of a test file; as on the page, its path is relative to tests/kvstore or to tests."""
    beside = ROOT / "tests" / "kvstore" / path
    file = beside if beside.exists() else ROOT / "tests" / path
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
