"""A described workload: arrivals, lengths, shares (`WorkloadSpec`), and the requests that follow from it.

Gaps between requests are drawn with mean 1 and stretched by the inverse of the accumulated rate. So burstiness and
profile are independent: the profile sets the number of requests per hour, the gaps their unevenness.

A *thread* is the activity of one user: a session of turns that each extend the last prompt, questions about one
document, or a single request. Each may begin with one of a few system prompts, whose popularity follows Zipf's law.
Shares are of newly begun threads, from 0 to 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Protocol

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord
from moonserve.traces.workload.threads import BlockIds, Chain, WaitingThreads

PROCESSES = ("constant", "poisson", "gamma")
_BISECTION_STEPS = 60  # of bisection; enough for the last bit of a double


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSpec:
    """rate(t) = rate · (1 − amplitude · cos(2π t / period)): the trace begins at the quietest time."""

    rate: float  # requests per second, mean over a period
    process: str = "poisson"
    burstiness: float = 1.0  # standard deviation / mean of the gaps; only for gamma
    diurnal_amplitude: float = 0.0  # 0 = constant; 1 = no requests at the quietest time
    diurnal_period_s: float = 86_400.0

    def check(self) -> None:
        """Raises ConfigError with the options to change."""
        if not 0 < self.rate < math.inf:
            raise ConfigError("--rate must be above 0 requests per second")
        if self.process not in PROCESSES:
            raise ConfigError(f"--arrivals is one of {', '.join(PROCESSES)}, not {self.process!r}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError("--burstiness must be above 0; 1 is Poisson")
        if not 0 <= self.diurnal_amplitude <= 1:
            raise ConfigError("--diurnal-amplitude is from 0 to 1")
        if not 0 < self.diurnal_period_s < math.inf:
            raise ConfigError("--diurnal-period-s must be above 0")

    def expected(self, until_s: float) -> float:
        """Returns the expected number of requests before `until_s`."""
        angular = 2 * math.pi / self.diurnal_period_s
        swing = self.diurnal_amplitude * math.sin(angular * until_s) / angular
        return self.rate * (until_s - swing)


def arrival_times(spec: ArrivalSpec, random: Random) -> Iterator[float]:
    """Yields endless arrival times in seconds from 0, never decreasing. The first gap precedes the first request."""
    expected = 0.0
    at_s = 0.0
    while True:
        expected += _unit_gap(spec, random)
        at_s = _arrival_of(spec, expected, not_before_s=at_s)
        yield at_s


def _unit_gap(spec: ArrivalSpec, random: Random) -> float:
    if spec.process == "constant":
        return 1.0
    if spec.process == "poisson":
        return random.expovariate(1.0)
    shape = spec.burstiness**-2
    return random.gammavariate(shape, 1 / shape)


def _arrival_of(spec: ArrivalSpec, expected: float, *, not_before_s: float) -> float:
    """Returns the inverse of `spec.expected`."""
    even_s = expected / spec.rate
    if not spec.diurnal_amplitude:
        return even_s
    # The accumulated swing never deviates by more than this from an even rate.
    swing_s = spec.diurnal_amplitude * spec.diurnal_period_s / (2 * math.pi)
    low, high = max(not_before_s, even_s - swing_s), even_s + swing_s
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        if spec.expected(middle) < expected:
            low = middle
        else:
            high = middle
    return high


class Distribution(Protocol):
    """A distribution of non-negative numbers."""

    def draw(self, random: Random) -> float:
        """Draws one number."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same number."""

    value: float

    def draw(self, random: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal with this mean. `sigma`: deviation of the logarithm (1: the 90th percentile is 2.2 × the mean)."""

    mean: float
    sigma: float

    def draw(self, random: Random) -> float:
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of the values, with equal probability."""

    values: tuple[float, ...]

    def draw(self, random: Random) -> float:
        return random.choice(self.values)


def draw_tokens(draws: Distribution, random: Random) -> int:
    """Draws a number of tokens, at least 1."""
    return max(1, round(draws.draw(random)))


def parse_distribution(text: str, flag: str) -> Distribution:
    """Parses a distribution. Raises ConfigError that names the flag and the syntax."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            mean, sigma = map(float, rest.split(":"))
            return LogNormal(_above_0(mean), _not_below_0(sigma))
        return Empirical(_values(Path(rest))) if kind == "empirical" else Constant(_not_below_0(float(text)))
    except ValueError as error:
        raise ConfigError(
            f"{flag}: {text!r} is no distribution ({error}); write a number, "
            "lognormal:MEAN:SIGMA or empirical:FILE with a number on each line"
        ) from error


def _values(path: Path) -> tuple[float, ...]:
    try:
        lines = path.read_text().split()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not lines:
        raise ValueError(f"{path} is empty")
    return tuple(_not_below_0(float(line)) for line in lines)


def _above_0(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is not above 0")
    return value


def _not_below_0(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not 0 or more")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload. The defaults are a chat with a few system prompts."""

    arrivals: ArrivalSpec = ArrivalSpec(rate=1.0)  # frozen, like the results of all calls below
    num_requests: int = 10_000
    input_tokens: Distribution = LogNormal(2_000, 1.0)
    output_tokens: Distribution = LogNormal(300, 0.8)
    max_input_tokens: int = 128_000
    # System prompts: all threads with the same one share its whole blocks.
    system_share: float = 1.0
    system_prompts: int = 10
    system_zipf: float = 1.0
    system_tokens: Distribution = Constant(1_024)
    # Sessions: a turn consists of the last prompt, its answer and new tokens.
    session_share: float = 0.5
    turns: float = 3.0  # mean, at least 1; geometric
    turn_tokens: Distribution = LogNormal(300, 1.0)
    think_s: Distribution = LogNormal(90, 1.0)  # from arrival to arrival
    # Documents: a question consists of the document and new tokens.
    document_share: float = 0.0
    questions: float = 4.0  # mean, at least 1; geometric
    document_tokens: Distribution = LogNormal(15_000, 0.8)
    question_tokens: Distribution = LogNormal(200, 0.8)

    def check(self) -> None:
        """Raises ConfigError with the options to change."""
        self.arrivals.check()
        for name in ("system_share", "session_share", "document_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} is a share from 0 to 1")
        if self.session_share + self.document_share > 1:
            raise ConfigError("--session-share and --document-share add up to more than 1")
        for name in ("num_requests", "max_input_tokens", "system_prompts", "turns", "questions"):
            if not 1 <= getattr(self, name) < math.inf:
                flag = "requests" if name == "num_requests" else name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least 1")
        if not 0 <= self.system_zipf < 100:
            raise ConfigError("--system-zipf must be 0 (all alike) or more")


_HOUR_S = 3_600

PRESETS = {
    "conversation": WorkloadSpec(
        arrivals=ArrivalSpec(rate=12_031 / _HOUR_S),
        num_requests=12_031,
        input_tokens=LogNormal(10_450, 1.1),
        output_tokens=LogNormal(343, 0.8),
        system_prompts=1,
        system_tokens=Constant(512),
        session_share=0.405,
        turns=2.6,
        turn_tokens=LogNormal(1_250, 1.3),
        think_s=LogNormal(170, 0.9),
    ),
    "tool-agent": WorkloadSpec(
        arrivals=ArrivalSpec(rate=23_608 / _HOUR_S),
        num_requests=23_608,
        input_tokens=LogNormal(3_930, 1.1),
        output_tokens=LogNormal(182, 0.9),
        system_prompts=40,
        system_zipf=1.2,
        system_tokens=LogNormal(3_680, 0.2),
        session_share=0.105,
        turns=4.0,
        turn_tokens=LogNormal(700, 1.0),
        think_s=LogNormal(30, 1.0),
    ),
    "synthetic": WorkloadSpec(
        arrivals=ArrivalSpec(rate=3_993 / _HOUR_S),
        num_requests=3_993,
        input_tokens=LogNormal(2_500, 1.1),
        output_tokens=LogNormal(149, 0.9),
        system_share=0.0,
        session_share=0.5,
        turns=3.0,
        turn_tokens=LogNormal(300, 1.0),
        think_s=LogNormal(60, 1.0),
        document_share=0.5,
        questions=3.3,
        document_tokens=LogNormal(26_300, 0.7),
        question_tokens=LogNormal(150, 0.8),
    ),
}


@dataclass(slots=True, eq=False)
class UserThread:
    """The state that the next request of a thread builds on."""

    base: Chain  # whole blocks that the next prompt begins with
    base_tokens: int  # of the next prompt, without its new tokens
    grows: bool  # True for a session; otherwise the base is fixed, like a document
    left: int  # remaining requests
    new_tokens: Distribution

    def validate(self) -> None:
        """Raises AssertionError unless the base is whole blocks of the next prompt."""
        assert self.left >= 0
        assert len(self.base) * TOKENS_PER_HASH <= self.base_tokens


def requests_of(spec: WorkloadSpec, random: Random) -> Iterator[TraceRecord]:
    """Yields endless records in order of time. `spec` must be checked."""
    threads = _UserThreads(spec, random)
    for at_s in arrival_times(spec.arrivals, random):
        yield threads.request(at_s)


class _SystemPrompts:
    """Picks system prompts by popularity. Each one is created at its first use."""

    def __init__(self, spec: WorkloadSpec, ids: BlockIds, random: Random) -> None:
        self._spec, self._ids, self._random = spec, ids, random
        weights = (rank**-spec.system_zipf for rank in range(1, spec.system_prompts + 1))
        self._cumulated = list(accumulate(weights))
        self._made: dict[int, tuple[Chain, int]] = {}

    def pick(self) -> tuple[Chain, int]:
        """Returns whole blocks and number of tokens; nothing for a thread without a system prompt."""
        if self._random.random() >= self._spec.system_share:
            return (), 0
        [rank] = self._random.choices(range(len(self._cumulated)), cum_weights=self._cumulated)
        if rank not in self._made:
            tokens = draw_tokens(self._spec.system_tokens, self._random)
            # One token remains for the rest of the prompt.
            tokens = min(tokens, self._spec.max_input_tokens - 1)
            self._made[rank] = self._ids.extend((), tokens // TOKENS_PER_HASH), tokens
        return self._made[rank]


class _UserThreads:
    """Continues or begins a thread at each arrival."""

    def __init__(self, spec: WorkloadSpec, random: Random) -> None:
        self._spec, self._random = spec, random
        self._ids = BlockIds()
        self._systems = _SystemPrompts(spec, self._ids, random)
        self._waiting: WaitingThreads[UserThread] = WaitingThreads()

    def request(self, at_s: float) -> TraceRecord:
        thread = self._waiting.pop_due(at_s)
        if thread is not None:
            tokens = thread.base_tokens + draw_tokens(thread.new_tokens, self._random)
            if tokens <= self._spec.max_input_tokens:
                thread.left -= 1
                return self._emit(thread, tokens, at_s)
        return self._begin(at_s)

    def _begin(self, at_s: float) -> TraceRecord:
        spec, random = self._spec, self._random
        system, system_tokens = self._systems.pick()
        kind = random.random()
        if kind < spec.session_share:
            later = draw_geometric(spec.turns, random) - 1
            thread = UserThread(system, system_tokens, True, later, spec.turn_tokens)
        elif kind < spec.session_share + spec.document_share:
            return self._begin_document(system, system_tokens, at_s)
        else:
            thread = UserThread(system, system_tokens, False, 0, spec.input_tokens)
        tokens = system_tokens + draw_tokens(spec.input_tokens, random)
        return self._emit(thread, min(tokens, spec.max_input_tokens), at_s)

    def _begin_document(self, system: Chain, system_tokens: int, at_s: float) -> TraceRecord:
        spec, random = self._spec, self._random
        tokens = system_tokens + draw_tokens(spec.document_tokens, random)
        tokens = min(tokens, spec.max_input_tokens - 1)
        base = self._ids.extend(system, tokens // TOKENS_PER_HASH - len(system))
        later = draw_geometric(spec.questions, random) - 1
        thread = UserThread(base, tokens, False, later, spec.question_tokens)
        tokens += draw_tokens(spec.question_tokens, random)
        return self._emit(thread, min(tokens, spec.max_input_tokens), at_s)

    def _emit(self, thread: UserThread, tokens: int, at_s: float) -> TraceRecord:
        output = draw_tokens(self._spec.output_tokens, self._random)
        blocks = -(-tokens // TOKENS_PER_HASH)
        chain = self._ids.extend(thread.base, blocks - len(thread.base))
        if thread.grows:
            thread.base = chain[: tokens // TOKENS_PER_HASH]
            thread.base_tokens = tokens + output
        if thread.left:
            self._waiting.add(thread, at_s + self._spec.think_s.draw(self._random))
        return TraceRecord(arrived_s=at_s, input_length=tokens, output_length=output, hash_ids=chain)


def draw_geometric(mean: float, random: Random) -> int:
    """Draws from a geometric distribution on 1, 2, … with the given mean of at least 1."""
    if mean == 1:
        return 1
    # Inverts the distribution, since counting trials takes time proportional to the result.
    return 1 + int(math.log1p(-random.random()) / math.log1p(-1 / mean))
