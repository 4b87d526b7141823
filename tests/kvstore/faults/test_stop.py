"""SIGSTOP of a node under load: others go on, and when it wakes nothing is wrong and nothing is missing."""

from __future__ import annotations

from pathlib import Path

from tests.kvstore.faults.pool import running_pool
from tests.kvstore.faults.values import Load

STOPPED_S = 3.0
"""Less than its lease at the registry. Who is forgotten meanwhile: `test_absence`."""


def test_a_stopped_node_costs_nothing_but_time(tmp_path: Path) -> None:
    with running_pool(tmp_path, 3, "--dram", "256MiB") as pool:
        with pool.store() as store, Load(store, "stop", timeout_s=2.0) as load:
            load.go_on(30)
            with pool.frozen("store-1"):
                load.go_on_for(STOPPED_S)
            load.go_on(30)
        pool.audit(load.uncertain, held=load.stored)
