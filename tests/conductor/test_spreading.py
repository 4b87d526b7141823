"""The pitfall of Algorithm 1's longest match: on the conversation trace all requests share their first block.

A trace is played in virtual time: a prompt's blocks are in its prefill instance's device cache and home store once its
first token is due. What counts is where uncached tokens, the work, were placed: the busiest instance's over the mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from conductor.events import BlockChanges, Event, Heartbeat, Load, Phase, Place, Placed, Report
from conductor.limits import Limits
from conductor.policies import make_policy
from conductor.policies.base import Offers, PlacementPolicy, Prompt, Weighed, predict_unfetched
from conductor.state import ConductorState
from protocol.ids import InstanceId, RequestId, Role
from protocol.keys import NO_PARENT, BlockKey
from protocol.layout import KvLayout
from protocol.profile import PrefillProfile
from tests.conductor.cluster import shown, worker
from tests.public_trace import TRACE, needs_trace
from traces.format import TOKENS_PER_HASH, TraceRecord, read_trace

NUM_PREFILLS = 8
CACHE_AWARE = ["global-cache-aware", "local-cache-aware", "session-affinity"]
LAYOUT = KvLayout(
    num_layers=80, block_size=TOKENS_PER_HASH, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
# The paper's testbed, fitted to its latency figure: 1.5 s for 12,000 tokens.
PREFILL = PrefillProfile(c0=0.0, c1=1.15e-4, c2=7.3e-10)


class LongestPrefix:
    """The naive router: whoever has most of the prompt, the first of equals."""

    name = "longest-prefix"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        first_of_longest = np.arange(len(offers.prefix_blocks)) / len(offers.prefix_blocks)
        return predict_unfetched(prompt, offers).by(first_of_longest - offers.prefix_blocks)


@dataclass
class Player:
    """One cluster that a trace is played to."""

    state: ConductorState

    def __post_init__(self) -> None:
        self.due: list[tuple[float, int, Event | str, tuple[BlockKey, ...]]] = []
        self.next_seq: dict[str, int] = {}
        self.queued = dict.fromkeys((f"p{i}" for i in range(NUM_PREFILLS)), 0)
        self.placed = dict.fromkeys(self.queued, 0)  # uncached tokens
        self.num_events = 0
        for i in range(NUM_PREFILLS):
            store = replace(worker(f"s{i}", Role.STORE, host=f"h{i}"), layout=None, fingerprint="")
            prefill = worker(f"p{i}", Role.PREFILL, host=f"h{i}", home=f"s{i}")
            decode = worker(f"d{i}", Role.DECODE)
            for registration in (store, prefill, decode):
                self.state.handle(self.fitted(registration), 0.0)

    def fitted(self, registration: Event) -> Event:
        large = {"num_blocks": 10**6, "max_model_len": 10**6, "bytes_per_s": 1e10}
        profile = {"prefill_profile": PREFILL}
        is_store = registration.role is Role.STORE  # type: ignore[union-attr]
        layout = {} if is_store else {"layout": LAYOUT}
        return replace(registration, **large, **profile, **layout)  # type: ignore[type-var]

    def play(self, records: Sequence[TraceRecord]) -> None:
        for number, record in enumerate(records):
            self.until(record.arrived_s)
            self.place(RequestId(f"r{number}"), record)
        self.until(float("inf"))
        self.state.validate()

    def place(self, request_id: RequestId, record: TraceRecord) -> None:
        full = record.input_length // TOKENS_PER_HASH
        keys = tuple(BlockKey((n + 1).to_bytes(16, "little")) for n in record.hash_ids[:full])
        event = Place(
            request_id=request_id,
            block_keys=keys,
            num_prompt_tokens=record.input_length,
            max_tokens=record.output_length or 1,
        )
        now = record.arrived_s
        reply = self.state.handle(event, now)[-1]
        assert isinstance(reply, Placed), reply
        prefill = reply.decision.prefill
        row = next(c for c in shown(reply.decision).prefill_candidates if c.instance_id == prefill)
        tokens = record.input_length - row.reuse_blocks * TOKENS_PER_HASH
        self.queued[prefill] += tokens
        self.placed[prefill] += tokens
        first_at = now + reply.placement.predicted_ttft_s
        report = Report(request_id=request_id, phase=Phase.FIRST_TOKEN, elapsed_s=first_at - now)
        self.later(first_at, report, ())
        self.later(first_at, f"{prefill}:{tokens}", keys)
        self.later(first_at + 1.0, replace(report, phase=Phase.FINISHED, output_tokens=100), ())

    def later(self, at: float, what: Event | str, keys: tuple[BlockKey, ...]) -> None:
        self.num_events += 1
        heapq.heappush(self.due, (at, self.num_events, what, keys))

    def until(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            at, _, what, keys = heapq.heappop(self.due)
            if isinstance(what, str):
                name, _, tokens = what.partition(":")
                self.queued[name] -= int(tokens)
                for event in self.told(name, keys):
                    self.state.handle(event, at)
            else:
                self.state.handle(what, at)

    def told(self, prefill: str, keys: tuple[BlockKey, ...]) -> Iterator[Heartbeat]:
        for name in (prefill, f"s{prefill[1:]}"):
            first = self.next_seq.get(name, 1)
            self.next_seq[name] = first + len(keys)
            yield Heartbeat(
                instance_id=InstanceId(name),
                epoch=1,
                load=Load(num_running=1, queued_tokens=self.queued.get(name, 0)),
                changes=BlockChanges(
                    first_seq=first,
                    next_seq=first + len(keys),
                    added=tuple(zip(keys, (NO_PARENT, *keys), strict=False)),
                ),
            )

    @property
    def imbalance(self) -> float:
        return max(self.placed.values()) * NUM_PREFILLS / sum(self.placed.values())


def played(policy: PlacementPolicy, records: Sequence[TraceRecord]) -> Player:
    limits = Limits(ttft_slo_s=1e9, tbt_slo_s=1e9, lease_s=1e9, placement_ttl_s=1e9)
    player = Player(ConductorState(policy, limits))
    player.play(records)
    return player


def conversations(num_requests: int) -> list[TraceRecord]:
    """As the conversation trace: one first block for all, sessions that grow turn by turn, a load of about a half."""
    rng = np.random.default_rng(7)
    sessions: list[tuple[int, ...]] = []
    next_id, now, records = 1, 0.0, []
    for _ in range(num_requests):
        now += float(rng.exponential(0.3))
        begun = (
            (0,) if not sessions or rng.random() < 0.4 else sessions[rng.integers(len(sessions))]
        )
        count = int(np.clip(rng.lognormal(2.3, 0.8), 1, 200))
        ids = begun + tuple(range(next_id, next_id + count))
        next_id += count
        sessions.append(ids[:-1])  # the partial last block is nobody else's
        records.append(
            TraceRecord(
                arrived_s=now,
                input_length=len(ids) * TOKENS_PER_HASH - int(rng.integers(TOKENS_PER_HASH)),
                output_length=100,
                hash_ids=ids,
            )
        )
    return records


def test_the_longest_prefix_alone_sends_everything_to_one_instance() -> None:
    """The contrast, without which the other tests would prove nothing."""
    player = played(LongestPrefix(), conversations(400))
    assert player.imbalance > 0.95 * NUM_PREFILLS


@pytest.mark.parametrize("name", CACHE_AWARE)
def test_cache_aware_policies_spread_the_work_of_a_shared_first_block(name: str) -> None:
    player = played(make_policy(name, 1.25), conversations(400))
    assert player.imbalance < 1.5, player.placed


@pytest.mark.trace
@pytest.mark.slow
@needs_trace
@pytest.mark.parametrize("name", [*CACHE_AWARE, LongestPrefix.name])
def test_the_conversation_trace_is_spread_too(name: str) -> None:
    records = read_trace(TRACE, 2_000)
    if name == LongestPrefix.name:
        assert played(LongestPrefix(), records).imbalance > 0.95 * NUM_PREFILLS
    else:
        player = played(make_policy(name, 1.25), records)
        assert player.imbalance < 1.5, player.placed
