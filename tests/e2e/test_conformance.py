"""Short, seeded run of schemathesis against a live cluster; `make conformance` runs for five minutes."""

from pathlib import Path

from tests.e2e.cluster import UNHURRIED, small_cluster
from tests.e2e.conformance import CONTEXT, run


def test_replies_conform_to_the_openapi_document(tmp_path: Path) -> None:
    """Allowed and forbidden requests to each endpoint never get a 5xx or a reply that the document does not list."""
    with small_cluster(tmp_path, *UNHURRIED, context=CONTEXT) as cluster:
        # One worker: threads that parse Python concurrently sometimes fail (python/cpython#106905).
        limits = ("--phases", "fuzzing", "--max-examples", "4", "--workers", "1", "--no-shrink")
        assert run(cluster.url, *limits) == 0
        assert not cluster.tracebacks(), cluster.logs()
