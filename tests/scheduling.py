"""Which tests run beside which: what `make test` hands to its processes (pytest-xdist), and in which order.

A file's tests stay together, in one process and in their order, since they share what its fixtures start; so do the
files of a folder in `TOGETHER`. The tests of `APART` start all they need themselves and go wherever there is room. What
takes longest comes first, so that nothing long is left when all else has ended, and clusters of processes run beside
what needs little. Knows nothing of what the tests do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest

FIRST = (
    "tests/rdma/test_guest.py",
    # Clusters of five processes each, by turns with what mostly waits.
    "tests/e2e/test_parity.py",
    "tests/deploy/ray/test_ray.py",
    "tests/kvstore/faults/test_stop.py",
    "tests/kvstore/faults/test_registry.py",
    "tests/e2e/test_seeds.py",
    # The public trace, simulated several times by one process: nothing of it may be left when all else has ended.
    "tests/traces/simulator/test_trace.py",
    "tests/traces/reproduction/test_trace.py",
    "tests/kvstore/replication/test_cluster.py",
    "tests/kvstore/faults/",
    "tests/e2e/test_load_and_leaks.py",
    "tests/kvstore/directory/test_cluster.py",
    "tests/e2e/test_lifecycle.py",
    "tests/transfer/test_failover.py",
    "tests/transfer/test_leaks.py",
    "tests/transfer/fuzz/",
    "tests/e2e/",
    "tests/docs/test_running.py",
    "tests/engine/",
    "tests/benchmarks/",
    "tests/prefill_worker/",
    "tests/decode_worker/",
    "tests/deploy/",
    "tests/kvstore/client/",
    "tests/kvstore/test_simulation.py",
)
"""Beginnings of test ids, in the order in which they are to begin; all others follow as they were found."""

APART = (
    "tests/kvstore/faults/",
    "tests/kvstore/replication/test_cluster.py",
    "tests/kvstore/directory/test_cluster.py",
    "tests/kvstore/test_simulation.py",
    "tests/transfer/test_leaks.py",
)
"""Beginnings of test ids that have nothing in common with their neighbours."""

CLUSTERS = (
    "tests/rdma/",
    "tests/e2e/",
    "tests/deploy/",
    "tests/docs/",
    "tests/networks/",
    "tests/chaos/",
    "tests/benchmarks/",
    "tests/kvstore/faults/",
    "tests/kvstore/replication/test_cluster.py",
    "tests/kvstore/directory/test_cluster.py",
)
"""Beginnings of test ids that start many processes: at most half of pytest's processes run such tests while there are
others, since the processors are shared by all that a cluster consists of, and what waits for them grows slow."""

TOGETHER = ("tests/engine/",)  # they share their models
"""Folders that are one piece."""


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same items, `FIRST` first."""
    return sorted(items, key=lambda item: _rank(item.nodeid))


def _rank(nodeid: str) -> int:
    return next((i for i, begin in enumerate(FIRST) if nodeid.startswith(begin)), len(FIRST))


class Scheduling(LoadScopeScheduling):
    """Files, and tests that need no others, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _assign_work_unit(self, node: Any) -> None:
        if self._num_running_clusters() >= max(1, len(self.nodes) // 2):
            others = (scope for scope in self.workqueue if not scope.startswith(CLUSTERS))
            if (scope := next(others, None)) is not None:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _num_running_clusters(self) -> int:
        """Processes that have such tests before them."""
        return sum(
            any(
                scope.startswith(CLUSTERS) and not all(done.values())
                for scope, done in work.items()
            )
            for work in self.assigned_work.values()
        )

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        folders = (folder for folder in TOGETHER if nodeid.startswith(folder))
        return next(folders, nodeid.partition("::")[0])
