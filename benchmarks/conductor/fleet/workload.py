"""Scenarios, and a synthetic load for a fleet: sessions of applications, with the shape of the published traces.

Blocks have 512 tokens. An application has a system prompt of 1 to 16 blocks; applications are as popular as 1/rank. A
session begins with its application's system prompt and a prompt of its own (log-normal, mean 6 blocks), and has 1 + a
geometric number of turns (mean 4), each of which adds the reply and 1 to 4 blocks. With these, the mean prompt has
about 12,000 tokens, as that of the conversation trace of Mooncake (FAST'25).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moonserve.conductor.placement.policies import DEFAULT_POLICY
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.protocol.step_time import PrefillProfile

BLOCK_TOKENS = 512
NUM_APPLICATIONS = 2_000
MEAN_TURNS = 5
MEAN_PAUSE_S = 1.5
OUTPUT_TOKENS = 343


def tokens_of(num_blocks: int) -> int:
    """Returns the tokens of a prompt: its full blocks and half a block."""
    return num_blocks * BLOCK_TOKENS + BLOCK_TOKENS // 2


@dataclass(slots=True)
class Prompt:
    at: float
    session: int
    keys: tuple[BlockKey, ...]
    num_tokens: int


class Sessions:
    """The prompts of a fleet's clients in order of arrival, equal for equal seeds."""

    def __init__(self, rate: float, seed: int) -> None:
        """`rate`: prompts per second, once sessions overlap as they end."""
        self._rng = np.random.default_rng(seed)
        self._rate = rate / MEAN_TURNS
        popularity = 1 / np.arange(1, NUM_APPLICATIONS + 1)
        self._popularity = np.cumsum(popularity / popularity.sum())
        sizes = self._rng.integers(1, 17, NUM_APPLICATIONS)
        self._systems = [self._keys(int(size)) for size in sizes]
        num_waiting = round(self._rate * (MEAN_TURNS - 1) * MEAN_PAUSE_S)
        self._waiting = [self._prompt(0.0, -number, self._begun()) for number in range(1, num_waiting + 1)]

    @property
    def waiting(self) -> list[Prompt]:
        """The latest prompts of the sessions that wait for their next turn at time 0, answered before."""
        return self._waiting

    def until(self, end_s: float) -> Iterator[Prompt]:
        """Yields the prompts that arrive before `end_s`."""
        due: list[tuple[float, int, int, list[BlockKey]]] = []  # time, session, turns left, its blocks
        begins_at, session = 0.0, 0
        for prompt in self._waiting:  # neither sessions nor their pauses age
            at = float(self._rng.exponential(MEAN_PAUSE_S))
            heapq.heappush(due, (at, prompt.session, self._turns(), list(prompt.keys)))
        while True:
            begins_at += float(self._rng.exponential(1 / self._rate))
            while due and due[0][0] <= min(begins_at, end_s):
                at, number, turns, keys = heapq.heappop(due)
                keys += self._keys(int(self._rng.integers(1, 5)))
                yield self._prompt(at, number, keys)
                if turns > 1:
                    pause_s = float(self._rng.exponential(MEAN_PAUSE_S))
                    heapq.heappush(due, (at + pause_s, number, turns - 1, keys))
            if begins_at > end_s:
                return
            session += 1
            keys = self._first()
            yield self._prompt(begins_at, session, keys)
            if turns := self._turns() - 1:
                heapq.heappush(due, (begins_at + float(self._rng.exponential(MEAN_PAUSE_S)), session, turns, keys))

    def _turns(self) -> int:
        """Returns the turns of a session; also those that remain at any time, since it does not age."""
        return int(self._rng.geometric(1 / MEAN_TURNS))

    def _first(self) -> list[BlockKey]:
        """Returns the blocks of a session's first prompt."""
        application = int(np.searchsorted(self._popularity, self._rng.random()))
        own = self._keys(min(int(self._rng.lognormal(1.2, 1.0)) + 1, 240))
        return self._systems[min(application, NUM_APPLICATIONS - 1)] + own

    def _begun(self) -> list[BlockKey]:
        """Returns the blocks of the latest prompt of a session at any time."""
        return self._first() + self._keys(round(2.5 * (self._turns() - 1)))

    def _prompt(self, at: float, session: int, keys: list[BlockKey]) -> Prompt:
        return Prompt(at, session, tuple(keys), tokens_of(len(keys)))

    def _keys(self, count: int) -> list[BlockKey]:
        data = self._rng.bytes(count * KEY_BYTES)
        return [BlockKey(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]


@dataclass(slots=True)
class Served:
    """One prompt's fate."""

    at: float
    ttft_s: float
    hit_blocks: int
    num_blocks: int
    shard: str


def hit_ratio(served: Sequence[Served]) -> float:
    """Returns the share of all blocks that prefill instances had."""
    return sum(each.hit_blocks for each in served) / sum(each.num_blocks for each in served)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    num_instances: int  # half of them prefill
    num_shards: int
    rate: float  # prompts per second
    policy: str = DEFAULT_POLICY
    load: float = 0.6  # of the prefill instances, with one conductor
    cached_blocks: int = 12_000  # per prefill instance
    warm_s: float = 5.0
    measured_s: float = 5.0
    seed: int = 1
    reports_changes: bool = False  # heartbeats also soon after each change of a cache, as workers send them
    dies_at: float | None = None  # of the first shard
    cut_at: float | None = None  # from here on, the first shard and the others do not hear each other
    back_at: float | None = None

    @property
    def num_prefills(self) -> int:
        return self.num_instances // 2

    def seconds_of(self, served: Served) -> float:
        """Returns the time for which a prompt computed."""
        return self.profile.seconds(tokens_of(served.num_blocks), served.hit_blocks * BLOCK_TOKENS)

    @cached_property
    def profile(self) -> PrefillProfile:
        """Returns a profile with which the fleet is loaded to `load`: scaled, since the ratio to the rate matters."""
        uncached = 2_300  # tokens per prompt, as measured with one conductor
        c1 = self.load * self.num_prefills / self.rate / uncached
        return PrefillProfile(c0=c1 * 10, c1=c1, c2=c1 * 1e-7)
