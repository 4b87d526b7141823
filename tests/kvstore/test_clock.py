"""A jump of the wall clock ends no lease or membership and ages no value: only `ALLOWED` code reads the wall clock."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "kvstore/node/removal_store.py": 1,  # a node's absence, if the time since boot does not tell
    "protocol/membership/heartbeats.py": 1,  # epochs of members of a conductor's cluster
    "protocol/membership/kv_event_publisher.py": 1,  # the time of a batch in vLLM's format
    "protocol/membership/embedded_registry.py": 1,  # epochs of an embedded registry's lives
    "protocol/process/logs.py": 1,
    "protocol/process/tracing.py": 1,
}
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


@pytest.mark.parametrize("package", ["kvstore", "protocol", "transfer"])
def test_only_listed_code_reads_the_wall_clock(package: str) -> None:
    """Leases, reservations, generations and memberships use monotonic clocks and counts, except for `ALLOWED` calls."""
    found: dict[str, int] = {}
    for path in (ROOT / package).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asks = node.value.id in {"time", "datetime"} and node.attr in WALL
                found[name] = found.get(name, 0) + asks
            if isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
                names = {alias.name for alias in node.names}
                assert not names & {*WALL, "datetime"}, f"{name} may ask for the wall clock"
    asking = {name: n for name, n in found.items() if n}
    assert asking == {name: n for name, n in ALLOWED.items() if name.startswith(package)}
