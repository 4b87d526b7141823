"""A store node for the vLLM servers of a test. It keeps its port and its disk when it is restarted."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.flipped_bytes import flip_bytes
from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import NodeStats, connect
from tests import processes
from tests.kvstore.node.nodes import Node
from tests.stopping import stopped
from tests.vllm.servers import TOKEN

DRAM = 256 << 20


def until_quiet(join: str) -> None:
    """Waits until no put into the store has begun or ended for a second."""
    before, since = _stats(join), time.monotonic()
    while time.monotonic() < since + 1.0:
        time.sleep(0.1)
        if (now := _stats(join)).num_objects != before.num_objects or now.reserved_bytes:
            before, since = now, time.monotonic()


def _stats(join: str) -> NodeStats:
    with connect(join, cluster_token=TOKEN) as client:
        return client.stats().total


@dataclass(slots=True, eq=False)
class StoreNode:
    """A node process, DRAM and SSD."""

    folder: Path
    dram: int = DRAM
    ssd: bool = True
    port: int = field(default_factory=free_port)
    node: Node | None = None

    @property
    def join(self) -> str:
        """URL for `kv_connector_extra_config`."""
        return f"node://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = ("--ssd", f"{self.folder / 'disk'}:1GiB") if self.ssd else ()
        named = ("--instance-id", "store-0", "--port", str(self.port), "--dram", str(self.dram))
        with (self.folder / "store.log").open("ab") as log:
            starting = processes.start("store", *named, *disk, token=TOKEN, stderr=log)
        try:
            self.node = Node(starting.process, starting.facts()["rpc"])
        except BaseException:
            starting.process.kill()
            starting.process.wait()
            raise

    def kill(self) -> None:
        if self.node is not None:
            self.node.kill()
            self.node = None

    def restart(self) -> None:
        """Stops the node by SIGTERM, on which it writes what is only in memory to disk, and starts it anew."""
        assert self.node is not None
        self.node.stop()
        self.start()

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        assert self.node is not None
        return stopped(self.node.process.pid)

    def stats(self) -> NodeStats:
        return _stats(self.join)

    def until_quiet(self) -> None:
        until_quiet(self.join)

    def flip_bytes(self, every: int) -> int:
        """Inverts a bit of each `every`th byte of the node's memory. Returns how many were inverted."""
        assert self.node is not None
        offsets = range(every // 2, self.dram, every)
        flip_bytes(self.node.process.pid, offsets, self.dram)
        return len(offsets)

    def __enter__(self) -> StoreNode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
