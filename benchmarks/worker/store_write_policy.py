"""Simulates putting only hot blocks into the store: the writes it saves prefill workers, and the hits it costs.

    python -m benchmarks.worker.store_write_policy [--trace FILE] [--requests 12000] [--json FILE]

Workers with a block pool each share one store. A request goes to the worker with the least waiting and computing:
backlogs drain at the pace that keeps workers busy for 0.8 of the time, and blocks on the device are not computed. The
worker takes leading blocks from its device's cache and the following ones from the store. It computes and publishes the
others and offers them to the product's write-behind, whose puts complete at once. Device and store evict as block pools
do: least recently used blocks first (with *devices lfu*: least frequently used), ends of chains before their parents. A
block is 512 tokens, as in the traces; partial blocks have no key.

*all* puts every new block, *hot, n* blocks that were reused n times in the device's cache, *when evicted* blocks that
leave the device without a put, *hot, 2, or evicted* both. Real devices would wait for such puts or start early.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness.measure import table, write_json
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions.events import PutDone, PutItem
from moonserve.prefill_worker.decisions.write_behind import WriteBehind
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey
from moonserve.protocol.request import Endpoint
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord, read_trace
from moonserve.traces.workload.generator import PRESETS, requests_of

WORKERS = 4
BUSY = 0.8
NEVER = 256  # more hits than the index counts
SIZES = ((0.5, 10.0), (2.0, 30.0))  # millions of tokens of each device and of the store


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """A rule that decides which blocks are put into the store."""

    name: str
    min_hits: int
    when_evicted: bool = False
    eviction: str = "lru"  # policy of the devices' pools


WRITE_POLICIES = (
    WritePolicy("all", 0),
    WritePolicy("hot, 1", 1),
    WritePolicy("hot, 2", 2),
    WritePolicy("when evicted", NEVER, when_evicted=True),
    WritePolicy("hot, 2, or evicted", 2, when_evicted=True),
    WritePolicy("none", NEVER),
    WritePolicy("all, devices lfu", 0, eviction="lfu"),
    WritePolicy("none, devices lfu", NEVER, eviction="lfu"),
)
STORE = Endpoint(instance_id="store", epoch=1, rpc_address="", transfer_address="", host="")


class Store:
    """Simulated store that all workers share."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, on_added=_ignore, on_removed=_ignore)
        self.num_written = 0

    def find(self, keys: Sequence[BlockKey]) -> int:
        """Reads the leading stored blocks of a chain; returns their number."""
        found = self._pool.match_prefix(keys)
        self._pool.retain(found)
        self._pool.release(found)
        return len(found)

    def put(self, key: BlockKey, parent: BlockKey | None) -> None:
        if self._pool.match_prefix([key]):
            return
        blocks = self._pool.allocate(1)
        assert blocks is not None, "nothing is held for long"
        self._pool.publish(blocks[0], key, parent or NO_PARENT, 0)
        self._pool.release(blocks)
        self.num_written += 1


class Worker:
    """A simulated worker: its device's block pool, its backlog and its puts."""

    def __init__(self, num_blocks: int, store: Store, rule: WritePolicy) -> None:
        self._store = store
        self._rule = rule
        self._parents: dict[BlockKey, BlockKey] = {}
        self._known: set[BlockKey] = set()  # blocks that were put into the store or found there
        self.pool = BlockPool(
            num_blocks,
            on_added=self._parents.__setitem__,
            on_removed=self._gone,
            eviction=rule.eviction,
        )
        self._puts = WriteBehind(self.pool, Counter(), max_in_flight=64, max_pending=4096, min_hits=rule.min_hits)
        self._puts.on_store_found(STORE)
        self.backlog = 0.0  # blocks
        self.at = 0.0

    def _gone(self, key: BlockKey) -> None:
        parent = self._parents.pop(key)
        self._puts.on_evicted(key)
        if self._rule.when_evicted and key not in self._known:
            self._store.put(key, parent)
        self._known.discard(key)

    def work_left(self, now: float, pace: float) -> float:
        """Returns the number of blocks to compute before a request that arrives now."""
        self.backlog = max(0.0, self.backlog - (now - self.at) * pace)
        self.at = now
        return self.backlog

    def serve(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Serves a prompt; returns the number of blocks found on the device, and of further ones in the store."""
        pool = self.pool
        found = pool.match_prefix(keys)
        stored = self._store.find(keys[len(found) :])
        pool.retain(found)
        fresh = pool.allocate(len(keys) - len(found))
        if fresh is None:
            raise ValueError(f"a prompt of {len(keys)} blocks does not fit into a device")
        pool.count_hits(found)
        blocks, parents = [*found, *fresh], [NO_PARENT, *keys]
        for index in range(len(found), len(keys)):
            pool.publish(blocks[index], keys[index], parents[index], 0)
            if index < len(found) + stored:
                self._puts.mark_stored(keys[index])
                self._known.add(keys[index])
        for block, key, parent in zip(blocks, keys, parents, strict=False):
            self._puts.enqueue(PutItem(key=key, parent=parent, checksum=0, block=block))
        self._put_all()
        pool.release(blocks)
        return len(found), stored

    def _put_all(self) -> None:
        while (put := self._puts.start()) is not None:
            for item in put.items:
                self._store.put(item.key, item.parent)
                self._known.add(item.key)
            self._puts.on_put_done(PutDone(put_id=put.put_id, num_refused=0, corrupt=()))


def main() -> None:
    arguments = _arguments()
    rows = [
        {"load": name} | simulate(records, rule, device, store)
        for name, records in _loads(arguments).items()
        for device, store in SIZES
        for rule in WRITE_POLICIES
    ]
    print(table(tuple(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))
    write_json(arguments.json, {"benchmark": "store_writes", "rows": rows})


def _cell(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) and value < 1 else value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a trace beside the synthetic loads")
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--requests", type=int, default=12_000, help="of each load, at most")
    parser.add_argument("--json", type=Path, default=Path("out/engine/store_writes.json"))
    return parser.parse_args()


def _loads(arguments: argparse.Namespace) -> dict[str, list[TraceRecord]]:
    loads = {
        name: list(islice(requests_of(PRESETS[name], Random(1)), arguments.requests)) for name in arguments.presets
    }
    if arguments.trace is not None:
        loads[arguments.trace.stem] = read_trace(arguments.trace, arguments.requests)
    return loads


def simulate(records: Iterable[TraceRecord], rule: WritePolicy, device: float, store: float) -> dict[str, Any]:
    """Runs a load. `device`, `store`: millions of tokens. The returned shares refer to all blocks of prompts."""
    prompts = [(record.arrived_s, _keys(record)) for record in records]
    shared = Store(_blocks(store))
    workers = [Worker(_blocks(device), shared, rule) for _ in range(WORKERS)]
    total = sum(len(keys) for _, keys in prompts)
    lasts_s = max(prompts[-1][0] - prompts[0][0], 1.0)
    pace = total / lasts_s / WORKERS / BUSY
    in_device = in_store = 0
    for now, keys in prompts:
        worker = min(workers, key=_added(keys, now, pace))
        found, stored = worker.serve(keys)
        worker.backlog += len(keys) - found - stored
        in_device += found
        in_store += stored
    return {
        "device": f"{device:g}M",
        "store": f"{store:g}M",
        "rule": rule.name,
        "hit_ratio": (in_device + in_store) / total,
        "of_device": in_device / total,
        "written": shared.num_written / total,
    }


def _added(keys: Sequence[BlockKey], now: float, pace: float) -> Callable[[Worker], float]:
    def work(worker: Worker) -> float:
        return worker.work_left(now, pace) + len(keys) - len(worker.pool.match_prefix(keys))

    return work


def _keys(record: TraceRecord) -> list[BlockKey]:
    full = record.hash_ids[: record.input_length // TOKENS_PER_HASH]
    return [BlockKey((each + 1).to_bytes(KEY_BYTES, "little")) for each in full]


def _blocks(millions: float) -> int:
    return int(millions * 1e6) // TOKENS_PER_HASH


def _ignore(*_: object) -> None:
    """Callback that does nothing."""


if __name__ == "__main__":
    main()
