"""SIGSTOP of a node under load: others go on, and when it wakes nothing is wrong and nothing is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.faults.pool import running_pool
from tests.kvstore.faults.values import Load
from tests.thoroughness import seconds

STOPPED = [
    (3.0, 0.0),  # less than its lease at the registry
    # More than that: the others forget it, and it has to join again.
    pytest.param(seconds(12.0, 30.0), 0.02, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stopped_s", "pause_s"), STOPPED)
def test_a_stopped_node_costs_nothing_but_time(
    tmp_path: Path, stopped_s: float, pause_s: float
) -> None:
    with running_pool(tmp_path, 3, "--dram", "256MiB") as pool:
        with (
            pool.store() as store,
            Load(store, "stop", timeout_s=2.0, pause_s=pause_s) as load,
        ):
            load.go_on(30)
            with pool.frozen("store-1"):
                load.go_on_for(stopped_s)
            load.go_on(30)
        pool.audit(load.uncertain, held=load.stored)
