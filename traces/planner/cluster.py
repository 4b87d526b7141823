"""A cluster that a plan may choose, and what the simulator says of it. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from traces.figures import ratio
from traces.reports.summary import summary
from traces.simulator.results import SimulationResult

_ALIKE = 3  # decimals of shares that count: a tenth of a per cent is noise of the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many machines of each role, how prompts are placed, and what each prefill machine remembers."""

    num_prefill: int
    num_decode: int
    policy: str
    dram_tokens: int  # of KV per prefill machine

    @property
    def num_machines(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def division(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one simulation; latencies in milliseconds, NaN when nothing completed."""

    effective: float  # share of all requests, rejected ones among them
    goodput: float  # effective requests per second
    mean_ttft_ms: float
    p90_ttft_ms: float
    p90_tbt_ms: float
    hit_ratio: float
    rejected: float  # share of all requests

    @property
    def merit(self) -> tuple[float, float]:
        """The greater the better: effective requests, and among equals the shorter TTFT."""
        ttft = self.mean_ttft_ms
        return (round(self.effective, _ALIKE), -ttft if ttft == ttft else float("-inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A cluster and what it makes of a part of the trace."""

    cluster: Cluster
    score: Score
    share: float  # of the trace's requests, the first ones


def score_of(result: SimulationResult) -> Score:
    """By the objectives that the result was simulated with."""
    figures = summary(result)
    return Score(
        effective=figures["effective_fraction"],
        goodput=figures["request_goodput"],
        mean_ttft_ms=figures["mean_ttft_ms"],
        p90_ttft_ms=figures["p90_ttft_ms"],
        p90_tbt_ms=figures["p90_tbt_ms"],
        hit_ratio=figures["hit_ratio"],
        rejected=ratio(figures["rejected"], figures["num_requests"]),
    )
