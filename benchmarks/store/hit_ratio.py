"""Measures the hit ratio of each eviction policy on a trace's prompts, against capacity.

The benchmark drives the catalog of a store node with objects of one unit, one per hash id of the trace. A request
leases its leading resident blocks (the hits), stores the other blocks behind them, and releases the lease; one request
at a time. The figures therefore apply to the product's policies under its leaf-first rule. `belady` is the upper bound
under that rule for a store that must keep new blocks: it knows the trace and evicts the block needed again last.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import table, write_json
from moonserve.kvstore.index_layout import Record
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.eviction import POLICY_NAMES, make
from moonserve.kvstore.state.eviction.base import EvictionPolicy
from moonserve.kvstore.state.objects import PutRequest, Tier, Watermarks
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord, read_trace

CAPACITIES = (3_000_000, 10_000_000, 30_000_000)
OPTIMUM = "belady"
FULL = Watermarks(evict_above=1.0, evict_share=0.0)  # evict only for space, one block at a time

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's chain, and its length in tokens."""

    keys: tuple[BlockKey, ...]
    num_tokens: int


class Belady(EvictionPolicy):
    """Evicts the block that is needed again last. Expects one `added` or `used` per block of `prompts`, in order."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__()
        self._uses: defaultdict[BlockKey, list[int]] = defaultdict(list)  # future uses, latest first
        for position, prompt in reversed(list(enumerate(prompts))):
            for key in prompt.keys:
                self._uses[key].append(position)
        self._never = len(prompts)
        self._keys: dict[Record, BlockKey] = {}

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._keys[record] = key
        self.used(record)

    def used(self, record: Record) -> None:
        uses = self._uses[self._keys[record]]
        uses.pop()
        self._set_rank(record, -(uses[-1] if uses else self._never), self._tick())


class NullListener:
    """Listener that ignores changes of the catalog."""

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None: ...

    def moved(self, key: BlockKey, tier: Tier) -> None: ...

    def removed(self, key: BlockKey) -> None: ...


def main() -> int:
    arguments = _arguments()
    prompts = prompts_of(read_trace(arguments.trace, arguments.limit), arguments.full_blocks)
    points = [
        measure(name, Belady(prompts) if name == OPTIMUM else make(name), prompts, capacity)
        for name in arguments.policies or (*POLICY_NAMES, OPTIMUM)
        for capacity in arguments.capacities
    ]
    points.append(measure("unlimited", make("fifo"), prompts, None))
    print(report(points))
    write_json(arguments.json, {"trace": arguments.trace.name, "points": points})
    if arguments.plot:
        _plot(points, arguments.plot)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store.hit_ratio",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="a Mooncake trace (moonserve traces fetch)")
    parser.add_argument("--limit", type=int, help="requests from the begin of the trace")
    parser.add_argument("--policies", nargs="+", choices=[*POLICY_NAMES, OPTIMUM])
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, help="of the store, in tokens")
    parser.add_argument("--full-blocks", action="store_true", help="leave out each prompt's partial last block")
    parser.add_argument("--json", type=Path, default=Path("out/store-hit-ratio.json"))
    parser.add_argument("--plot", type=Path, help="a PNG file of the table")
    return parser.parse_args()


def prompts_of(records: Sequence[TraceRecord], full_blocks: bool = False) -> list[Prompt]:
    """Returns prompts with one key per hash id; with `full_blocks`, only hash ids of whole blocks of tokens."""
    prompts = []
    for record in records:
        num_full = record.input_length // TOKENS_PER_HASH
        ids = record.hash_ids[:num_full] if full_blocks else record.hash_ids
        num_tokens = num_full * TOKENS_PER_HASH if full_blocks else record.input_length
        keys = tuple(BlockKey((each + 1).to_bytes(KEY_BYTES, "little")) for each in ids)
        prompts.append(Prompt(keys, num_tokens))
    return prompts


def measure(name: str, policy: EvictionPolicy, prompts: Sequence[Prompt], capacity: int | None) -> Point:
    """Measures one point of the plot. `capacity` is in tokens; None = all blocks fit."""
    num_blocks = sum(len(prompt.keys) for prompt in prompts)
    room = num_blocks if capacity is None else capacity // TOKENS_PER_HASH
    hits = replay(policy, prompts, room)
    tokens = sum(min(hit * TOKENS_PER_HASH, prompt.num_tokens) for hit, prompt in zip(hits, prompts, strict=True))
    return {
        "policy": name,
        "capacity_tokens": capacity,
        "block_hit_ratio": sum(hits) / num_blocks,
        "token_hit_ratio": tokens / sum(prompt.num_tokens for prompt in prompts),
    }


def replay(policy: EvictionPolicy, prompts: Sequence[Prompt], room: int) -> list[int]:
    """Returns each prompt's number of resident leading blocks, in a store with room for `room` blocks.

    Raises ValueError if a single prompt is larger than the store.
    """
    catalog = Catalog(
        room * ALIGNMENT,
        index=KeyIndex(),
        policies=lambda: policy,  # used for memory; without a disk, the disk's policy is idle
        announce=NullListener(),
        watermarks=FULL,
    )
    return [_serve(catalog, prompt) for prompt in prompts]


def _serve(catalog: Catalog, prompt: Prompt) -> int:
    found = map(catalog.find, prompt.keys)
    held = [stored for stored in itertools.takewhile(bool, found) if stored]
    for stored in held:
        catalog.hold(stored)
    catalog.used(reversed(held))  # in the order of a lease
    for parent, key in itertools.pairwise((None, *prompt.keys)):
        if key is not None and catalog.find(key) is None:
            stored_new = catalog.reserve(PutRequest(key=key, parent=parent, length=ALIGNMENT))
            if stored_new is None:
                raise ValueError(f"a prompt of {len(prompt.keys)} blocks does not fit")
            catalog.publish(stored_new, checksum=0)
    for stored in held:
        catalog.drop_hold(stored)
    return len(held)


def report(points: Sequence[Point]) -> str:
    """Returns a table with a row per policy and a column per capacity: hit ratio of blocks (of prompt tokens)."""
    capacities = list(dict.fromkeys(point["capacity_tokens"] for point in points))
    cells = {(point["policy"], point["capacity_tokens"]): _cell(point) for point in points}
    names = list(dict.fromkeys(point["policy"] for point in points))
    rows = [[name, *(cells.get((name, each), "") for each in capacities)] for name in names]
    return table(("", *map(_tokens, capacities)), rows)


def _cell(point: Point) -> str:
    return f"{point['block_hit_ratio']:.3f} ({point['token_hit_ratio']:.3f})"


def _tokens(capacity: int | None) -> str:
    return "unlimited" if capacity is None else f"{capacity / 1e6:g}M tokens"


def _plot(points: Sequence[Point], path: Path) -> None:
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(point["policy"] for point in points):
        line = [point for point in points if point["policy"] == name]
        ratios = [point["block_hit_ratio"] for point in line]
        if line[0]["capacity_tokens"] is None:
            panel.axhline(ratios[0], color="grey", linestyle=":", label=name)
            continue
        style = "k--" if name == OPTIMUM else "o-"
        panel.plot([point["capacity_tokens"] / 1e6 for point in line], ratios, style, label=name)
    panel.set_xscale("log")
    capacities = sorted({p["capacity_tokens"] / 1e6 for p in points if p["capacity_tokens"]})
    panel.set_xticks(capacities, labels=[f"{each:g}" for each in capacities])
    panel.minorticks_off()
    panel.set_xlabel("capacity, millions of tokens")
    panel.set_ylabel("hits / all blocks")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
