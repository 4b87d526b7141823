"""Two nodes with the same id: the second ends with a reason, and can take over the id once the first is dead."""

from pathlib import Path

import pytest

from moonserve.protocol.membership.registry import TTL_S
from tests.kvstore.faults.pool import running_pool
from tests.kvstore.faults.values import Load
from tests.patience import PATIENCE_S


@pytest.mark.slow  # waits twice for a lease of 10 s to end
def test_the_second_owner_of_an_id_ends_with_a_reason_and_takes_over_a_dead_ones_place(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "64MiB") as pool:
        first = pool.running["store-0"]
        with pool.store() as store, Load(store, "first") as load:
            load.go_on(10)
            second = pool.begin("store-0")
            second.ready()
            assert second.process.wait(TTL_S + PATIENCE_S) == 1
            said = second.output.read_text()
            assert "store-0 belongs to another process, which keeps renewing it" in said
            assert first.rpc_address in said
            load.go_on(10)
            assert not load.errors
            assert not load.missed
        pool.audit([], held=load.stored, gone=load.removed)
        pool.kill("store-0")
        pool.start("store-0")
        with pool.store() as store, Load(store, "second") as load:
            load.go_on(10)
        pool.audit([], held=load.stored, gone=load.removed)


def test_a_folder_belongs_to_one_running_node(tmp_path: Path) -> None:
    with running_pool(tmp_path, 1, "--dram", "8MiB", ssd="64MiB") as pool:
        pool.disks["store-1"] = pool.disks["store-0"]
        with pytest.raises(ChildProcessError, match="in use"):
            pool.begin("store-1").ready()
        with pytest.raises(ChildProcessError, match="in use"):
            pool.begin("store-0").ready()
        with pool.store() as store, Load(store, "alone") as load:
            load.go_on(10)
        pool.restart("store-0")
        pool.audit(load.stored)
