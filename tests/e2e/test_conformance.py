"""A short, seeded look by schemathesis at a live cluster; `make conformance` looks for five minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import UNHURRIED, small_cluster
from tests.e2e.conformance import CONTEXT, run

pytestmark = pytest.mark.e2e


def test_replies_are_what_the_document_says(tmp_path: Path) -> None:
    """Some requests of each endpoint, allowed and forbidden ones: none ends in a 5xx or in anything undescribed."""
    with small_cluster(tmp_path, *UNHURRIED, context=CONTEXT) as cluster:
        # One worker: threads that parse Python at once fail each other now and then (python/cpython#106905).
        limits = ("--phases", "fuzzing", "--max-examples", "4", "--workers", "1", "--no-shrink")
        assert run(cluster.url, *limits) == 0
        assert not cluster.tracebacks(), cluster.logs()
