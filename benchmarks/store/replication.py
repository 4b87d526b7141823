"""`python -m benchmarks.store.replication`: simulates a pool without a conductor, with and without copies of hot
prefixes.

Time is virtual. Each of eight hosts has a store node and readers. All hosts read a few prefixes, each of which has a
home node. A reader reads a prefix from the node on its host if that holds it, else over the link of the prefix's home.
The directory's planner (`kvstore.directory.replica_planner`) sees every read and copies hot prefixes, over the same
links.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from benchmarks.harness.measure import table
from moonserve.kvstore.directory import Directory
from moonserve.kvstore.directory.heat import Heat
from moonserve.kvstore.directory.replica_planner import ReplicaPlanner
from moonserve.kvstore.directory.replica_plans import NodeView, ReplicaCopy
from moonserve.kvstore.directory.replicator import PLAN_EVERY_S
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, pack_keys
from moonserve.protocol.latency import mean, percentile
from moonserve.protocol.request import InstanceId
from moonserve.traces.simulator.network import FlowId, Network

NUM_HOSTS = 8
LINK_BYTES_PER_S = 3.125e9  # 25 Gbit/s
LOCAL_BYTES_PER_S = 10e9
NUM_BLOCKS = 16  # blocks per prefix
BLOCK_BYTES = 16 << 20
POPULARITY = (8, 4, 2, 1)  # relative read rates of the prefixes
LOADS = (0.5, 0.8, 0.95, 1.1)  # load of the link of the most popular prefix's home
CAPACITY_BLOCKS = 1_000
HEADERS = ("load of the home's link", "replication", "read mean, s", "p90", "p99", "copies")


@dataclass
class Pool:
    """A simulated pool."""

    replicates: bool
    now: float = 0.0
    reads_s: list[float] = field(default_factory=list)
    num_copies: int = 0

    def __post_init__(self) -> None:
        names = [f"store-{i}" for i in range(NUM_HOSTS)]
        links = {f"{name}/{way}": LINK_BYTES_PER_S for name in names for way in ("out", "in")}
        self.network = Network(links | {f"{name}/local": LOCAL_BYTES_PER_S for name in names})
        self.nodes = [InstanceId(name) for name in names]
        self.directory = Directory()
        self.next_seq = dict.fromkeys(self.nodes, 1)
        self.heat = Heat()
        self.planner = ReplicaPlanner(self.directory, self.heat)
        self.prefixes = [_chain(number) for number in range(len(POPULARITY))]
        for number, prefix in enumerate(self.prefixes):
            self._hold(self.nodes[number], prefix)
        self.reading: dict[FlowId, float] = {}  # start times
        self.copying: dict[FlowId, ReplicaCopy] = {}

    def run(self, rate: float, num_reads: int, random: Random) -> None:
        """Simulates Poisson arrivals from random hosts until `num_reads` reads have ended."""
        next_plan = PLAN_EVERY_S
        arrives_at = random.expovariate(rate)
        while len(self.reads_s) < num_reads:
            wake_at = self.network.wake_at
            self.now = min(t for t in (arrives_at, next_plan, wake_at) if t is not None)
            for flow in self.network.advance(self.now):
                self._ended(flow)
            if self.now >= arrives_at:
                self._read(random)
                arrives_at += random.expovariate(rate)
            if self.now >= next_plan:
                next_plan += PLAN_EVERY_S
                if self.replicates:
                    self._plan()

    def _read(self, random: Random) -> None:
        (number,) = random.choices(range(len(POPULARITY)), POPULARITY)
        prefix, reader = self.prefixes[number], random.choice(self.nodes)
        self.heat.record(pack_keys(prefix), self.now)
        is_here = reader in self.directory.holders(prefix[-1])
        links = [f"{reader}/local"] if is_here else [f"{self.nodes[number]}/out", f"{reader}/in"]
        flow = self.network.start(links, len(prefix) * BLOCK_BYTES, self.now)
        self.reading[flow] = self.now

    def _plan(self) -> None:
        plan = self.planner.plan({view.instance_id: view for view in self._views()}, self.now)
        for copy in plan.copies:
            source = copy.steps[0].source
            links = [f"{source}/out", f"{copy.target}/in"]
            flow = self.network.start(links, len(copy.keys) * BLOCK_BYTES, self.now)
            self.copying[flow] = copy

    def _ended(self, flow: FlowId) -> None:
        if (began_at := self.reading.pop(flow, None)) is not None:
            self.reads_s.append(self.now - began_at)
        if (copy := self.copying.pop(flow, None)) is not None:
            self._hold(copy.target, copy.keys)
            self.planner.copy_ended(copy, succeeded=True, now=self.now)
            self.num_copies += 1

    def _hold(self, node: InstanceId, keys: Sequence[BlockKey]) -> None:
        first = self.next_seq[node]
        self.next_seq[node] += len(keys)
        added = tuple((key, parent) for parent, key in pairwise((NO_PARENT, *keys)))
        self.directory.apply_pairs(node, 1, added, (), first, self.next_seq[node], first == 1)

    def _views(self) -> Iterator[NodeView]:
        for node in self.nodes:
            used = self.directory.num_blocks(node)
            yield NodeView(
                instance_id=node,
                host=node,
                free_bytes=CAPACITY_BLOCKS - used,
                capacity_bytes=CAPACITY_BLOCKS,
            )


def _chain(number: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(f"{number}-{i}".encode().ljust(16, b".")) for i in range(NUM_BLOCKS))


def rows(num_reads: int, seed: int) -> Iterator[list[str]]:
    share = POPULARITY[0] / sum(POPULARITY) * (NUM_HOSTS - 1) / NUM_HOSTS
    for load in LOADS:
        rate = load * LINK_BYTES_PER_S / (NUM_BLOCKS * BLOCK_BYTES) / share
        for replicates in (False, True):
            pool = Pool(replicates)
            pool.run(rate, num_reads, Random(seed))
            reads = sorted(pool.reads_s)
            figures = (mean(reads), percentile(reads, 90), percentile(reads, 99))
            yield [
                f"{load:.0%}",
                "heat" if replicates else "off",
                *(f"{each:.3f}" for each in figures),
                str(pool.num_copies),
            ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=2_000, help="reads per row")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    print(table(HEADERS, list(rows(arguments.reads, arguments.seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
