"""NIXL over UCX: descriptor lists and one transfer request per batch, all prepared in advance.

The progress thread is off on both sides, because on shared cores it costs milliseconds per operation. So the target
polls while it serves. `UCX_TLS` selects the path; over shared memory, UCX needs error handling off.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

from benchmarks.transfer import contestant
from benchmarks.transfer.contestant import private_pool
from benchmarks.transfer.workload import LOCAL, POOL_BYTES, REMOTE, Bytes, Load, Offsets

STALLED_S = 20.0
POLLS_PER_LOOK = 64


def _agent(name: str, pool: Bytes, options: dict[str, Any]) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": options["error_handling"]})
    agent.register_memory([(pool.ctypes.data, POOL_BYTES, 0, "")], "DRAM")
    return agent


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._agent = _agent("target", self.pool, options)

    def hello(self) -> dict[str, Any]:
        card = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"card": card, "base": self.pool.ctypes.data}

    def serve(self, load: Load, mode: str, stopped: Callable[[], bool]) -> None:
        while not stopped():
            for _ in range(POLLS_PER_LOOK):
                self._agent.get_new_notifs()
            os.sched_yield()


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._agent = _agent("initiator", self.pool, options)

    def connect(self, other: dict[str, Any]) -> None:
        self._peer = self._agent.add_remote_agent(base64.b64decode(other["card"]))
        self._base = other["base"]

    def prepared(self, batch: Offsets) -> Any:
        blocks = batch.reshape(-1, 2)
        lists = [
            self._agent.get_xfer_descs(self._descriptors(base + blocks[:, end]), "DRAM")
            for base, end in ((self.pool.ctypes.data, LOCAL), (self._base, REMOTE))
        ]
        return self._agent.initialize_xfer(self.load.op.upper(), *lists, self._peer)

    def _descriptors(self, addresses: Any) -> Any:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses, self.load.block_bytes
        return rows

    def post(self, batch: Any) -> tuple[Any, str]:
        return batch, self._agent.transfer(batch)

    def wait(self, posted: tuple[Any, str]) -> None:
        request, state = posted
        give_up_at = time.monotonic() + STALLED_S
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
            if state == "PROC":
                os.sched_yield()
                if time.monotonic() > give_up_at:
                    raise TimeoutError("the transfer stays in progress")
        if state != "DONE":
            raise OSError(f"the transfer ended as {state}")

    def done(self) -> None:
        for request in self.batches:
            request.release()
        super().done()
