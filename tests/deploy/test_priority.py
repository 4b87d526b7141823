"""Workers give way to who answers clients."""

from __future__ import annotations

import os
import subprocess

from deploy.config import ServeConfig
from deploy.plan import WORKER_NICE, member_specs
from deploy.supervisor import give_way


def test_workers_give_way_and_nobody_else_does() -> None:
    specs = member_specs(ServeConfig(), "/model", "127.0.0.1:5")
    nice = {spec.instance_id: spec.nice for spec in specs}
    assert nice == {"store-0": 0, "prefill-0": WORKER_NICE, "decode-0": WORKER_NICE, "gateway-0": 0}


def test_a_process_runs_at_its_priority_and_one_that_has_ended_is_nobodys_trouble() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    before = os.getpriority(os.PRIO_PROCESS, child.pid)
    give_way(child.pid, 0)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == before
    give_way(child.pid, before + 3)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == before + 3
    child.kill()
    child.wait()
    give_way(child.pid, before + 4)
