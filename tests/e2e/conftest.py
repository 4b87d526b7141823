"""Fixture: the cluster that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, small_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Small cluster with the module's FLAGS and ENVIRON, and a model with a context of CONTEXT tokens."""
    options = {"context": getattr(request.module, "CONTEXT", 1024), "environ": getattr(request.module, "ENVIRON", None)}
    with small_cluster(tmp_path_factory.mktemp("cluster"), *request.module.FLAGS, **options) as started:
        yield started
        assert not started.tracebacks(), started.logs()
