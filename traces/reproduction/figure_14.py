"""Figure 14 of FAST'25: savings by a cached prefix for one long prompt. It uses its own prompts, not the trace's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from traces.format import TraceRecord
from traces.reproduction.figure import Figure, Finding, Line, Plot, Results, Row, Subject
from traces.reproduction.testbed import MOONCAKE
from traces.simulator.results import RequestOutcome
from traces.simulator.run import simulate

_BLOCK = MOONCAKE.block_size
_BLOCKS = (16, 32, 64, 128, 250)  # 8k … 128,000 tokens: within one block of the model's length
_PREFIX = 0.95
_APART_S = 120.0  # longer than computing any of the prompts
_LONGEST = _BLOCKS[-1]

_WHY = (
    "The cost model has the quadratic part of attention, so a prefix that is 95 % of the tokens is 93 % of the work"
    " at this length. The paper's TTFT saves less than its prefill does, since the prefix has to be loaded: 40 GiB"
    " at 128 GB/s take 0.3 s here. Its testbed also spends time on scheduling and on what could not be overlapped;"
    " ours has none of that."
)


def finding(_subject: Subject, _results: Results) -> Finding:
    spec = replace(MOONCAKE, num_prefill=1, num_decode=1)
    outcomes = simulate(spec, _prompts()).outcomes
    pairs = {blocks: outcomes[2 * i : 2 * i + 2] for i, blocks in enumerate(_BLOCKS)}
    cold, warm = pairs[_LONGEST]
    rows = (
        Row("TTFT without a prefix, 128,000 tokens", cold.ttft_s, unit="s"),
        Row("TTFT with 95 % of it cached", warm.ttft_s, unit="s"),
        Row("of which loading the prefix", warm.load_s, unit="s"),
        Row("device time saved", 1 - warm.prefill_s / cold.prefill_s, 0.92, unit="%"),
        Row("TTFT saved", _saved(cold, warm), published=0.86, unit="%"),
    )
    plot = Plot(
        "TTFT of one prompt on idle machines",
        "prompt, tokens",
        "seconds",
        (Line("nothing cached", _points(pairs, 0)), Line("95 % cached", _points(pairs, 1))),
        log_x=True,
        log_y=True,
    )
    claims = {
        "TTFT falls by at least 86 % at 128k": _saved(cold, warm) >= 0.86,
        "and by at least 85 % from 8k on": all(_saved(*pair) >= 0.85 for pair in pairs.values()),
    }
    return Finding(rows=rows, claims=claims, plots=(plot,), why=_WHY)


def _prompts() -> list[TraceRecord]:
    """Returns for each length a cold prompt and one that shares 95 % of it, each alone in the cluster."""
    records: list[TraceRecord] = []
    base = 0
    for blocks in _BLOCKS:
        shared = tuple(range(base, base + round(blocks * _PREFIX)))
        for _ in range(2):
            base += blocks
            own = range(base, base + blocks - len(shared))
            records.append(
                TraceRecord(
                    arrived_s=_APART_S * len(records),
                    input_length=blocks * _BLOCK,
                    output_length=1,
                    hash_ids=(*shared, *own),
                )
            )
        base += blocks
    return records


def _saved(cold: RequestOutcome, warm: RequestOutcome) -> float:
    assert cold.ttft_s is not None
    assert warm.ttft_s is not None
    return 1 - warm.ttft_s / cold.ttft_s


def _points(pairs: Mapping[int, Sequence[RequestOutcome]], which: int) -> tuple[tuple[float, float], ...]:
    return tuple((n * _BLOCK, pair[which].ttft_s or 0.0) for n, pair in pairs.items())


FIGURE = Figure(
    name="figure-14",
    title="Figure 14: one long prompt with a cached prefix",
    setting="One prefill machine with the prefix in its DRAM, nobody else there; prompts made for this,"
    " whatever the trace.",
    finding=finding,
)
