"""Two experiments of the arXiv report (2407.00079): cache policies, and admission under overload.

Cache policies: hit rate by eviction policy and cache size in blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.reproduction.published_figure import Figure, FigureResult, Line, Plot, PublicTrace, Results, Row
from benchmarks.reproduction.testbed import (
    MOONCAKE,
    costly_decoding,
    effective_share,
    mooncake_run,
    rejected_share,
    wasted_device_s,
)
from moonserve.kvstore.state.eviction import POLICY_NAMES
from moonserve.protocol.errors import ConfigError
from moonserve.traces.experiments.parallel_runs import Job
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.heartbeats_and_samples import block_key_of
from moonserve.traces.simulator.pool import Store
from moonserve.traces.simulator.results import SimulationResult

HITS = "hits"  # name of the counter
_CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)  # blocks
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
            keys = tuple(map(block_key_of, record.hash_ids))
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


_WHY_CACHE_POLICIES = (
    "The report's trace is another one, and it is not public: 23,000 requests of mean input 7,590, half of whose blocks"
    " are hits. The conversation trace has three quarters of its blocks used once, and most of the others once more, so"
    " it needs ten times the room for the same share of its maximum. On it the order is the reverse at small sizes:"
    " LFU here ages its counts (LFU-DA), so old favourites leave, and a block that was read once is more likely to be"
    " read again than one that was not; plain LFU keeps what was popular an hour ago. From 30,000 blocks on,"
    " where most fits, LRU is best for us, too."
)


def cache_policies_runs(subject: PublicTrace) -> Mapping[str, Job]:
    """Returns the replays by policy and capacity. Capacities below the longest prompt are left out."""
    longest = max(len(record.hash_ids) for record in subject.records)
    return {
        f"{policy} {room}": CacheReplay(policy=policy, num_blocks=room)
        for policy in _PUBLISHED
        for room in _CAPACITIES
        if room >= longest
    }


def evaluate_cache_policies(subject: PublicTrace, results: Results) -> FigureResult:
    total = sum(len(record.hash_ids) for record in subject.records)
    distinct = len({hash_id for record in subject.records for hash_id in record.hash_ids})
    most = (total - distinct) / total
    rooms = [room for room in _CAPACITIES if f"lru {room}" in results]
    ratios = {name: [results[f"{name} {room}"].counters[HITS] / total for room in rooms] for name in _PUBLISHED}
    rows = [Row("unlimited", most, published=_UNLIMITED)]
    rows += [
        Row(
            f"{name}, {room:,} blocks",
            ours,
            published=_PUBLISHED[name][_CAPACITIES.index(room)],
            why="another trace",
        )
        for name, line in ratios.items()
        for room, ours in zip(rooms, line, strict=True)
    ]
    lines = [Line(name, tuple(zip(map(float, rooms), line, strict=True))) for name, line in ratios.items()]
    published = tuple(zip(map(float, _CAPACITIES), _PUBLISHED["lru"], strict=True))
    lines.append(Line("published, LRU, other trace", published, is_published=True))
    plot = Plot(
        "Hit ratio by policy",
        "cache, blocks of 512 tokens",
        "hits / all blocks",
        tuple(lines),
        y_unit="%",
        log_x=True,
    )
    return FigureResult(
        rows=tuple(rows), claims=_claims_cache_policies(ratios, most), plots=(plot,), why=_WHY_CACHE_POLICIES
    )


def _claims_cache_policies(ratios: dict[str, list[float]], most: float) -> dict[str, bool]:
    lru, lfu, length = ratios["lru"], ratios["lfu"], ratios["length-aware"]
    return {
        "with the largest cache LRU ≥ LFU ≥ LengthAware (within half a point)": (
            lru[-1] >= lfu[-1] - _TIE and lfu[-1] >= length[-1] - _TIE
        ),
        "no policy exceeds unlimited room": all(ratio <= most for line in ratios.values() for ratio in line),
    }


CACHE_POLICIES = Figure(
    name="cache-policies",
    title="Cache policies (arXiv 2407.00079)",
    setting="One cache of so many blocks, one request after the other, hits as a share of all blocks.",
    runs=cache_policies_runs,
    evaluate=evaluate_cache_policies,
)


# The arXiv report's overload test: requests rejected by each kind of admission.

_SPEED = 2.0
_COST_FACTOR = 6.0  # factor on the published cost per sequence; with it the baseline rejects about the published share
_OF = 23_000
_PER = 1_000


@dataclass(frozen=True, slots=True)
class _AdmissionVariant:
    """A kind of admission."""

    name: str  # as in the report, or ours
    admission: str
    double_check: bool = False
    published: int | None = None  # number of rejected requests

    def run(self) -> Job:
        model = costly_decoding(_COST_FACTOR)
        return mooncake_run(_SPEED, admission=self.admission, double_check=self.double_check, model=model)

    def rows(self, result: SimulationResult) -> tuple[Row, ...]:
        late = sum(each.reason == "tbt_slo_at_handoff" for each in result.outcomes)
        return (
            Row(
                f"rejected of {_PER:,}, {self.name}",
                rejected_share(result) * _PER,
                published=None if self.published is None else self.published / _OF * _PER,
                why="" if self.published is None else "another trace",
            ),
            Row(f"at the handoff, {self.name}", late / len(result.outcomes) * _PER),
            Row(
                f"prefill time for nothing, {self.name}",
                wasted_device_s(result) / result.counters["device_s"],
                unit="%",
            ),
            Row(f"effective, {self.name}", effective_share(result, MOONCAKE.tbt_slo_s), unit="%"),
        )


_BASELINE = _AdmissionVariant("baseline, when the prompt is computed", "late", published=4_183)
_EARLY = _AdmissionVariant("early, by the decode load now", "current", double_check=True, published=3_771)
_PREDICTIVE = _AdmissionVariant("early, by the predicted decode load", "predicted", double_check=True, published=3_589)
_UNCHECKED_EARLY = _AdmissionVariant("by the decode load now, unchecked", "current")
_UNCHECKED = _AdmissionVariant("by the predicted decode load, unchecked", "predicted")
_VARIANTS = (_BASELINE, _EARLY, _PREDICTIVE, _UNCHECKED_EARLY, _UNCHECKED)

_WHY_OVERLOAD = (
    "Another trace (23,000 requests) and other limits, which are not stated: only the order can be compared. By the"
    " published decode times eight decode machines are never short at twice the trace's speed; decoding is made so"
    " dear that the baseline rejects about the published share. In all three ways the decode machine looks again when"
    " the prompt is computed, as the report's local scheduler does, and steps may take 95 % of the target, since a"
    " request's longest tenth of gaps has the one in which it joins. The baseline computes a fifth or more of all"
    " prompts for nothing; its queues grow, and with them the time over which a load would have to be foreseen. What"
    " runs now is within the target wherever machines refuse, so that the load of now holds back few. The prediction"
    " counts what is under way and, as in all but one of six cases, those who will overtake: it rejects on arrival"
    " what others reject later, and is seldom corrected. Live machines do not look again: the last two ways, of which"
    " the load of now lets in far too many."
)


def overload_runs(_subject: PublicTrace) -> Mapping[str, Job]:
    return {way.name: way.run() for way in _VARIANTS}


def evaluate_overload(_subject: PublicTrace, results: Results) -> FigureResult:
    rows = [row for way in _VARIANTS for row in way.rows(results[way.name])]
    return FigureResult(rows=tuple(rows), claims=_claims_overload(results), why=_WHY_OVERLOAD)


def _claims_overload(results: Results) -> dict[str, bool]:
    baseline, early, predictive, _, _ = (rejected_share(results[way.name]) for way in _VARIANTS)
    kept = {way: effective_share(results[way.name], MOONCAKE.tbt_slo_s) for way in _VARIANTS}
    wasted = {way: wasted_device_s(results[way.name]) for way in _VARIANTS}
    return {
        "early rejects fewer than the baseline": early < baseline,
        "predictive rejects fewer than early": predictive < early,
        "predictive computes less than a tenth of the baseline's prompts for nothing": (
            wasted[_PREDICTIVE] < wasted[_BASELINE] / 10
        ),
        "predictive leaves most requests effective, and without the second look more than the other two": (
            kept[_PREDICTIVE] == max(kept.values()) and kept[_UNCHECKED] > max(kept[_BASELINE], kept[_EARLY])
        ),
    }


OVERLOAD = Figure(
    name="overload",
    title="Overload (arXiv 2407.00079)",
    setting=f"8 prefill and 8 decode machines, the trace at {_SPEED:g} times its speed, decoding {_COST_FACTOR:g} times"
    " as dear per sequence; rejection above 30 s of TTFT or 100 ms of TBT.",
    runs=overload_runs,
    evaluate=evaluate_overload,
)
