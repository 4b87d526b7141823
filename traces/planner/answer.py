"""Presents a plan as a table, as JSON, and as command lines that simulate and serve it. Pure: returns text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pydantic_core

from protocol.config import to_flags
from traces.output import text_table
from traces.planner.search import Cluster, Plan, Question, Scored
from traces.reports.numbers import milliseconds, percent, plain, seconds
from traces.simulator.command import SimulateConfig

FORMAT = "moonserve plan 1"

_COLUMNS = (
    "prefill", "decode", "policy", "DRAM tokens", "effective", "goodput/s", "rejected",
    "TTFT s mean", "p90", "TBT ms p90", "hits",
)  # fmt: skip


def options_of(cluster: Cluster, common: SimulateConfig) -> SimulateConfig:
    """Returns the `moonserve simulate` options for this cluster."""
    return replace(
        common,
        prefill=cluster.num_prefill,
        decode=cluster.num_decode,
        policy=(cluster.policy,),
        dram_tokens=cluster.dram_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan and the question that it answers."""

    trace: str  # the file's name
    num_requests: int
    options: SimulateConfig  # common to all clusters
    question: Question
    plan: Plan

    def simulate(self, cluster: Cluster) -> str:
        """Returns the command line that reproduces the plan's figures."""
        flags = to_flags(options_of(cluster, self.options))
        at = flags.index("--trace")
        rest = flags[:at] + flags[at + 2 :]
        return shlex.join(["moonserve", "simulate", flags[at + 1], *rest])

    def serve(self, cluster: Cluster) -> str:
        """Returns the command line that serves this division and policy. The user fills in MODEL and the cache
        memory."""
        words = {
            "--prefill-workers": cluster.num_prefill,
            "--decode-workers": cluster.num_decode,
            "--placement-policy": cluster.policy,
            "--ttft-slo": f"{self.options.ttft_slo:g}",
            "--tbt-slo": f"{self.options.tbt_slo:g}",
        }
        return " ".join(["moonserve serve MODEL", *(f"{flag} {word}" for flag, word in words.items())])


def format_answer(answer: Answer) -> str:
    """Formats the answer for a terminal."""
    found, question = answer.plan, answer.question
    parts = [
        _asked(answer),
        f"most goodput with {question.num_machines} machines, and who came next",
        _table([found.best, *found.rivals]),
        f"{found.best.cluster.division} with smaller caches; {found.thrifty.cluster.dram_tokens:,} tokens per prefill"
        " machine cost hardly anything",
        _table([found.best, *found.caches]),
        *_smallest(answer),
        f"simulate it: {answer.simulate(_recommended(found))}",
        f"serve it: {answer.serve(_recommended(found))}",
    ]
    return "\n\n".join(parts)


def _recommended(found: Plan) -> Cluster:
    """Returns the smallest sufficient cluster, otherwise the best one with no more cache than it needs."""
    return (found.smallest or found.thrifty).cluster


def _asked(answer: Answer) -> str:
    options = answer.options
    speed = "" if options.speedup == 1 else f" at {options.speedup:g} times its speed"
    return (
        f"{answer.trace}{speed}, {answer.num_requests:,} requests on {options.model_profile}; effective:"
        f" TTFT ≤ {options.ttft_slo:g} s and TBT ≤ {options.tbt_slo * 1000:g} ms"
    )


def _smallest(answer: Answer) -> list[str]:
    found, question = answer.plan, answer.question
    wanted = percent(question.target)
    if found.smallest is None:
        return [
            f"no cluster of {question.num_machines} machines keeps {wanted} effective; the best has"
            f" {percent(found.best.score.effective)}: try more --nodes"
        ]
    count = found.smallest.cluster.num_machines
    rows = [found.smallest, *([found.too_small] if found.too_small else [])]
    title = f"smallest with {wanted} effective: {count} machines"
    return [f"{title}{', and the best of one fewer' if found.too_small else ''}", _table(rows)]


def _table(rows: Sequence[Scored]) -> str:
    return text_table(_COLUMNS, list(map(_cells, rows)))


def _cells(scored: Scored) -> list[str]:
    cluster, score = scored.cluster, scored.score
    return [
        plain(cluster.num_prefill),
        plain(cluster.num_decode),
        cluster.policy,
        plain(cluster.dram_tokens),
        percent(score.effective),
        f"{score.goodput:.2f}",
        percent(score.rejected),
        seconds(score.mean_ttft_ms),
        seconds(score.p90_ttft_ms),
        milliseconds(score.p90_tbt_ms),
        percent(score.hit_ratio),
    ]


def to_json(answer: Answer) -> str:
    """Returns the answer as JSON. Equal answers give equal text; NaN and infinity become null."""
    found = answer.plan
    whole = {
        "format": FORMAT,
        "trace": answer.trace,
        "num_requests": answer.num_requests,
        "speedup": answer.options.speedup,
        "model_profile": answer.options.model_profile,
        "slo_ttft_s": answer.options.ttft_slo,
        "slo_tbt_s": answer.options.tbt_slo,
        "num_machines": answer.question.num_machines,
        "target": answer.question.target,
        "best": _plain(found.best),
        "rivals": [_plain(each) for each in found.rivals],
        "caches": [_plain(each) for each in found.caches],
        "thrifty": _plain(found.thrifty),
        "smallest": _plain(found.smallest),
        "too_small": _plain(found.too_small),
        "simulate": answer.simulate(_recommended(found)),
        "serve": answer.serve(_recommended(found)),
    }
    return pydantic_core.to_json(whole, indent=2, inf_nan_mode="null").decode() + "\n"


def _plain(scored: Scored | None) -> dict[str, Any] | None:
    return None if scored is None else {**asdict(scored.cluster), **asdict(scored.score)}
