"""Measures what hints about sessions gain: agents' traffic, simulated with the store's catalog and the conductor.

The traffic is synthetic: agents that call tools, with pauses of varied length, some of which never return; chats; and
long prompts that nobody repeats. The same traffic runs three times at equal memory: without hints, with the gateway's
predictions, and with hints of the clients. Clients do not know everything: agents name twice the median run of the tool
that they call, also before turns after which they never return, and prompts that nobody repeats say `store: false`.

`returning` are all turns of agents but the first, `chat` those of chats, `others` everything else. TTFT is in seconds.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from random import Random

from benchmarks.harness.measure import table
from moonserve.gateway.generation.session_returns import SessionReturns
from moonserve.kvstore.state.eviction import POLICY_NAMES
from moonserve.protocol.latency import mean
from moonserve.protocol.request import NO_HINTS, CacheHints
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord, read_trace
from moonserve.traces.simulator.cluster.disaggregated import DisaggregatedCluster
from moonserve.traces.simulator.cluster.event_loop import Arrive, Event, EventLoop, TimedEvent
from moonserve.traces.simulator.cluster.run import request_states_of
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800
from moonserve.traces.simulator.prefill import Prompt
from moonserve.traces.simulator.results import RequestOutcome
from moonserve.traces.simulator.spec import ClusterSpec
from moonserve.traces.workload.threads import BlockIds, Chain

NONE, LEARNED, CLIENTS = "no hints", "predictions", "clients' hints"
AGENT, CHAT, ONE_SHOT = "agent", "chat", "one-shot"
RETURNING, OTHERS = "returning", "others"
COLUMNS = ("returning mean", "returning p90", "chat mean", "others mean", "returning hits", "chat hits", "hits")
AGENT_SYSTEMS, AGENT_SYSTEM_TOKENS = 4, 4_096
TOOLS_S = (3.0, 12.0, 45.0)  # median runs of three kinds of tools
WAIT_S = 400.0  # median wait for a person's approval
SECONDS_PER_TOKEN, FIRST_TOKEN_S = 0.03, 2.0  # of a reply, as the client that wrote the trace saw it


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: its record, and what its client knows."""

    record: TraceRecord
    kind: str
    session: str = ""
    is_first: bool = True
    likely_pause_s: float | None = None  # median of the pause that follows; None = unknown, or none follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Rates are new sessions, or prompts, per second."""

    duration_s: float = 1_800.0
    agents: float = 0.035
    chats: float = 0.06
    one_shots: float = 0.22
    turns: float = 10.0  # mean, of agents
    lost: float = 0.04  # share of an agent's turns after which it never returns, though it called a tool
    waits: float = 0.05  # share after which a person must approve


def traffic(spec: Traffic, seed: int) -> list[Turn]:
    random, ids = Random(seed), BlockIds()
    systems = [ids.extend((), AGENT_SYSTEM_TOKENS // TOKENS_PER_HASH) for _ in range(AGENT_SYSTEMS)]
    threads: list[Iterator[Turn]] = []
    for rate, kind in ((spec.agents, AGENT), (spec.chats, CHAT), (spec.one_shots, ONE_SHOT)):
        at_s = random.expovariate(rate)
        while at_s < spec.duration_s:
            name = f"{kind}-{len(threads)}"
            threads.append(_thread(spec, kind, name, at_s, Random(f"{seed}-{name}"), ids, systems))
            at_s += random.expovariate(rate)
    turns = merge(*threads, key=lambda turn: turn.record.arrived_s)
    return [turn for turn in turns if turn.record.arrived_s < spec.duration_s]


def _thread(
    spec: Traffic, kind: str, name: str, at_s: float, random: Random, ids: BlockIds, systems: Sequence[Chain]
) -> Iterator[Turn]:
    if kind == ONE_SHOT:
        tokens = _lognormal(random, 14_000, 0.6)
        yield Turn(record=_record(ids, (), tokens, 200, at_s)[0], kind=kind)
        return
    base: Chain = random.choice(systems) if kind == AGENT else ()
    tokens = len(base) * TOKENS_PER_HASH + _lognormal(random, 6_000 if kind == AGENT else 2_000, 0.7)
    mean_turns, is_first = (spec.turns if kind == AGENT else 3.0), True
    while tokens < 100_000:
        output = _lognormal(random, 150 if kind == AGENT else 350, 0.6)
        record, base = _record(ids, base, tokens, output, at_s)
        is_last = random.random() < 1 / mean_turns
        is_lost = kind == AGENT and random.random() < spec.lost
        median_s = random.choice(TOOLS_S) if random.random() > spec.waits else WAIT_S
        median_s = median_s if kind == AGENT else 60.0
        knows = kind == AGENT and not is_last
        yield Turn(
            record=record, kind=kind, session=name, is_first=is_first, likely_pause_s=median_s if knows else None
        )
        if is_last or is_lost:
            return
        pause_s = median_s * math.exp(random.gauss(0, 0.8))
        at_s += FIRST_TOKEN_S + output * SECONDS_PER_TOKEN + pause_s
        tokens += output + _lognormal(random, 1_200 if kind == AGENT else 200, 1.0)
        is_first = False


def _record(ids: BlockIds, base: Chain, tokens: int, output: int, at_s: float) -> tuple[TraceRecord, Chain]:
    """Returns a record whose prompt extends `base`, and its whole blocks."""
    chain = ids.extend(base, -(-tokens // TOKENS_PER_HASH) - len(base))
    record = TraceRecord(arrived_s=at_s, input_length=tokens, output_length=output, hash_ids=chain)
    return record, chain[: tokens // TOKENS_PER_HASH]


def _lognormal(random: Random, mean_tokens: float, sigma: float) -> int:
    return max(1, round(random.lognormvariate(math.log(mean_tokens) - sigma**2 / 2, sigma)))


class HintedCluster(DisaggregatedCluster):
    """A simulated cluster whose prefill machines store blocks with hints."""

    def __init__(self, spec: ClusterSpec, turns: Sequence[Turn], variant: str) -> None:
        records = [turn.record for turn in turns]
        super().__init__(spec, request_states_of(records, spec.block_size, spec.model.max_model_len))
        self._turns, self._variant = turns, variant
        self._returns = SessionReturns()
        self._hints: dict[int, CacheHints] = {}
        self._open: set[int] = set()  # indexes of requests

    def handle(self, event: Event, now: float) -> list[TimedEvent[Event]]:
        if isinstance(event, Arrive):
            self._hints[event.request.index] = self._hints_of(self._turns[event.request.index], now)
            self._open.add(event.request.index)
        for node in self.prefills:
            node.store.advance(now)
        out = super().handle(event, now)
        for index in [each for each in self._open if self.requests[each].end is not None]:
            self._open.remove(index)
            self._returns.ended(self._turns[index].session, now)
        return out

    def _hints_of(self, turn: Turn, now: float) -> CacheHints:
        if self._variant == NONE or not turn.session:
            return CacheHints(store=self._variant != CLIENTS)
        predicted = self._returns.began(turn.session, turn.kind, now)
        if self._variant == CLIENTS and turn.likely_pause_s is not None:
            return CacheHints(return_within_s=2 * turn.likely_pause_s + self._returns.reply_s)
        if predicted is None:
            return NO_HINTS
        return CacheHints(return_within_s=predicted.within_s)

    def _publish(self, prompt: Prompt) -> None:
        request = self._request_of[prompt.request_id]
        store, num_blocks = self._machines_of(request)[0].store, prompt.computed // self._block_size
        hints = self._hints[request.index]
        if hints.store:
            store.put(request.keys[:num_blocks], prompt.cached // self._block_size, hints)


def measure(turns: Sequence[Turn], variant: str, spec: ClusterSpec) -> dict[str, float]:
    """Simulates one run and returns its figures: TTFT in seconds and hit ratios of prompt tokens."""
    cluster = HintedCluster(spec, turns, variant)
    loop: EventLoop[Event] = EventLoop()
    loop.run(cluster.begin(), cluster.handle)
    outcomes = [request.outcome(0.0) for request in cluster.requests]
    groups: dict[str, list[RequestOutcome]] = {RETURNING: [], CHAT: [], OTHERS: []}
    for turn, outcome in zip(turns, outcomes, strict=True):
        kind = OTHERS if turn.is_first else RETURNING if turn.kind == AGENT else CHAT
        groups[kind].append(outcome)
    figures = {"hits": _hits(outcomes)}
    for name, some in groups.items():
        ttfts = sorted(outcome.ttft_s for outcome in some if outcome.ttft_s is not None)
        if some:
            figures |= {f"{name} mean": mean(ttfts), f"{name} p90": ttfts[int(0.9 * len(ttfts))]}
            figures[f"{name} hits"] = _hits(some)
    return figures


def _hits(outcomes: Sequence[RequestOutcome]) -> float:
    return sum(o.cached_tokens for o in outcomes) / sum(o.input_length for o in outcomes)


def cluster_spec(dram_tokens: int, disk_tokens: int, eviction: str, num_machines: int = 2) -> ClusterSpec:
    model = dataclasses.replace(LLAMA3_70B_8XA800, dram_tokens=dram_tokens, disk_tokens=disk_tokens)
    return ClusterSpec(
        model=model,
        num_prefill=num_machines,
        num_decode=num_machines,
        policy="moonserve",
        admission="none",
        eviction=eviction,
    )


def compare(runs: Sequence[Sequence[Turn]], spec: ClusterSpec, variants: Sequence[str]) -> list[list[str]]:
    """Returns a row per variant: the mean of each figure over the runs, and the change to the first variant."""
    rows: list[list[str]] = []
    base: dict[str, float] = {}
    for variant in variants:
        found = [measure(turns, variant, spec) for turns in runs]
        figures = {name: mean([each[name] for each in found]) for name in found[0]}
        base = base or figures
        cells = [_cell(name, figures.get(name), base) for name in COLUMNS]
        rows.append([f"{spec.model.dram_tokens:,} + {spec.model.disk_tokens:,}", spec.eviction, variant, *cells])
    return rows


def _cell(name: str, figure: float | None, base: Mapping[str, float]) -> str:
    if figure is None:
        return ""
    if name.endswith("hits"):
        return f"{figure:.3f}"
    change = figure / base[name] - 1
    return f"{figure:.2f}" + (f" ({change:+.0%})" if abs(change) >= 0.005 else "")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store.sessions",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22, 23, 24])
    parser.add_argument("--dram-tokens", type=int, nargs="+", default=[60_000, 120_000, 200_000], help="per machine")
    parser.add_argument("--disk-tokens", type=int, default=0, help="per machine")
    parser.add_argument("--machines", type=int, default=2, help="of each role")
    parser.add_argument("--eviction", nargs="+", default=["lru"], choices=POLICY_NAMES)
    parser.add_argument("--trace", type=Path, help="a trace without sessions, in which predictions must change nothing")
    arguments = parser.parse_args()
    runs, variants = [traffic(Traffic(), seed) for seed in arguments.seeds], [NONE, LEARNED, CLIENTS]
    if arguments.trace:
        runs, variants = [[Turn(record=each, kind=CHAT) for each in read_trace(arguments.trace)]], [NONE, LEARNED]
    rows = []
    for eviction in arguments.eviction:
        for dram_tokens in arguments.dram_tokens:
            spec = cluster_spec(dram_tokens, arguments.disk_tokens, eviction, arguments.machines)
            rows += compare(runs, spec, variants)
    print(table(("tokens: memory + disk", "policy", "variant", *COLUMNS), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
