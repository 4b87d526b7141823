"""The arXiv report's table of cache policies: hit rate by eviction policy and cache size in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.eviction import POLICY_NAMES
from protocol.errors import ConfigError
from traces.format import TraceRecord
from traces.reproduction.figure import Figure, Finding, Line, Plot, Results, Row, Subject
from traces.simulator.many import Work
from traces.simulator.pool import Store
from traces.simulator.results import SimulationResult
from traces.simulator.sampling import key_of

HITS = "hits"  # name of the counter
_ROOMS = (1_000, 10_000, 30_000, 50_000, 100_000)  # blocks
_PUBLISHED = {  # on the report's own trace
    "lru": (0.30, 0.40, 0.48, 0.50, 0.51),
    "lfu": (0.30, 0.35, 0.43, 0.49, 0.51),
    "length-aware": (0.30, 0.35, 0.42, 0.48, 0.50),
}
_UNLIMITED = 0.51
_TIE = 0.005  # the report rounds to hundredths


@dataclass(frozen=True, kw_only=True)
class CacheReplay:
    """Work: a store of `num_blocks` blocks under one eviction policy. The result has only the counter HITS."""

    policy: str
    num_blocks: int

    @property
    def cost(self) -> float:
        return 0.3  # measured

    def check(self) -> None:
        """Raises ConfigError for an unknown policy."""
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"no eviction policy {self.policy!r}")

    def do(self, records: Sequence[TraceRecord]) -> SimulationResult:
        """Replays the requests: each reads its cached leading blocks and stores the rest, a partial last one too."""
        store = Store(self.num_blocks, 0, self.policy)
        hits = 0
        for record in records:
            keys = tuple(map(key_of, record.hash_ids))
            held = store.hold(keys)
            store.put(keys, len(held))
            store.let_go(held)
            hits += len(held)
        return SimulationResult(
            name=self.policy,
            outcomes=(),
            ttft_slo_s=0,
            tbt_slo_s=0,
            duration_s=0,
            counters={HITS: hits},
        )


_WHY = (
    "The report's trace is another one, and it is not public: 23,000 requests of mean input 7,590, half of whose blocks"
    " are hits. The conversation trace has three quarters of its blocks used once, and most of the others once more, so"
    " it needs ten times the room for the same share of its maximum. On it the order is the reverse at small sizes:"
    " LFU here ages its counts (LFU-DA), so old favourites leave, and a block that was read once is more likely to be"
    " read again than one that was not; plain LFU keeps what was popular an hour ago. From 30,000 blocks on,"
    " where most fits, LRU is best for us, too."
)


def runs(subject: Subject) -> Mapping[str, Work]:
    """Returns the replays by policy and capacity. Capacities below the longest prompt are left out."""
    longest = max(len(record.hash_ids) for record in subject.records)
    return {
        f"{policy} {room}": CacheReplay(policy=policy, num_blocks=room)
        for policy in _PUBLISHED
        for room in _ROOMS
        if room >= longest
    }


def finding(subject: Subject, results: Results) -> Finding:
    total = sum(len(record.hash_ids) for record in subject.records)
    distinct = len({hash_id for record in subject.records for hash_id in record.hash_ids})
    most = (total - distinct) / total
    rooms = [room for room in _ROOMS if f"lru {room}" in results]
    ratios = {name: [results[f"{name} {room}"].counters[HITS] / total for room in rooms] for name in _PUBLISHED}
    rows = [Row("unlimited", most, published=_UNLIMITED)]
    rows += [
        Row(
            f"{name}, {room:,} blocks",
            ours,
            published=_PUBLISHED[name][_ROOMS.index(room)],
            why="another trace",
        )
        for name, line in ratios.items()
        for room, ours in zip(rooms, line, strict=True)
    ]
    lines = [Line(name, tuple(zip(map(float, rooms), line, strict=True))) for name, line in ratios.items()]
    published = tuple(zip(map(float, _ROOMS), _PUBLISHED["lru"], strict=True))
    lines.append(Line("published, LRU, other trace", published, is_published=True))
    plot = Plot(
        "Hit ratio by policy",
        "cache, blocks of 512 tokens",
        "hits / all blocks",
        tuple(lines),
        y_unit="%",
        log_x=True,
    )
    return Finding(rows=tuple(rows), claims=_claims(ratios, most), plots=(plot,), why=_WHY)


def _claims(ratios: dict[str, list[float]], most: float) -> dict[str, bool]:
    lru, lfu, length = ratios["lru"], ratios["lfu"], ratios["length-aware"]
    return {
        "with the largest cache LRU ≥ LFU ≥ LengthAware (within half a point)": (
            lru[-1] >= lfu[-1] - _TIE and lfu[-1] >= length[-1] - _TIE
        ),
        "no policy exceeds unlimited room": all(ratio <= most for line in ratios.values() for ratio in line),
    }


FIGURE = Figure(
    name="cache-policies",
    title="Cache policies (arXiv 2407.00079)",
    setting="One cache of so many blocks, one request after the other, hits as a share of all blocks.",
    runs=runs,
    finding=finding,
)
