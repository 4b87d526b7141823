"""Formats docs/policies.md from the figures of `benchmarks.policies`. Pure functions; knows no simulator.

Ratios are moonserve's figure divided by Algorithm 1's. The page names the rows that miss a claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import table

MEAN_BAR, GOODPUT_BAR, WORSE_BAR = 0.85, 1.10, 0.02
OVERLOADED = 0.9  # overload: Algorithm 1 serves a smaller share of requests than this within the objectives

_PROSE = """# The placement policy moonserve

`--placement-policy moonserve`, the default of `moonserve serve` and `moonserve conductor`, places a prompt where it
adds the least delay: its own TTFT and, for each prompt that it goes before, its prefill time. Prompts wait shortest
first, as far as their TTFT objectives allow; what costs more than it brings while many wait goes behind the others.
`conductor/policies/least_added_delay.py` has reasons and constants, the record of a decision (`moonserve explain`) each
instance's wait in the order of ranks and what others wait longer.

The order reaches the machines as a *rank*, seconds that a prompt yields: a prefill worker takes prompts by arrival +
rank, for each step anew, so that a long prompt is passed between its chunks, and by nothing that comes later than its
rank. Ranks are relative to the arrival where the prompt waits, since clocks of different hosts are never compared.

## Beside Algorithm 1

Simulated (`python -m benchmarks.policies --trace FILE`): Llama 3 70B on machines of eight A800, objectives 30 s to the
first token and 0.1 s between tokens. *Algorithm 1* is `global-cache-aware` at the best of several balancing thresholds,
by mean TTFT. TTFT in seconds, of all that got a first token; *in time*: requests that kept both objectives. Admission
*none* serves everybody, *predicted* refuses whose prediction misses an objective. The constants were tuned on other
synthetic traces than those of the table; the price of copies was also looked at on the published one.
"""


_LIMITS = """
## What it costs, and what it does not do

- Weighing 16 instances with a dozen prompts each takes about 15 µs of processor time where Algorithm 1 takes 9. Of
  more instances only the 16 with the shortest waits in order of arrival are looked at exactly.
- The mean is bought from long prompts: under overload without admission the last percent waits for minutes, at most
  for 30 objectives and ten times its own prefill time, then it is its turn. With admission it is refused at once.
- Where queues are short there is nothing to win: at the trace's own speed prompts wait a tenth of their TTFT.
- With admission little is won beside the time that others wait. Algorithm 1 refuses long prompts first, too: waits
  are near the objective then, and theirs are the longest. Of the first 8,000 requests at six times the speed it
  keeps 78.0%, moonserve 79.5%. Whoever knew them all, refused the longest first and forgot no prefix would keep
  86%; but what is refused leaves no prefix to its conversation. A fixed limit on seconds of prefill keeps 79.2% with
  2.1 s and 72.0% with 1.6 s, a steeper price (10 for 4) 79.7%. So 10% more are what such foresight could win there.
- Where decoding is short, letting in what adds much to steps only while little runs keeps 88.7, 87.4 and 84.3% for
  three strengths, and 89.3% without: it holds room free that nobody uses.
- The order assumes that predictions of prefill time are about right; a wrong one costs time, never a token.
"""


def as_page(result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            _PROSE,
            _comparison(result["rows"]),
            "",
            *_verdicts(result["rows"]),
            _last_percent(result["rows"]),
            "",
            "## What each term is worth",
            "",
            f"{result['ablated']['trace']}, at {result['ablated']['speedup']:g} times its speed, 8 + 8 machines,"
            f" {result['ablated']['requests']} requests, admission none.",
            "",
            _ablations(result["ablations"]),
            _LIMITS,
        ]
    )


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    headers = (
        "trace", "requests", "speed", "P + D", "admission", "threshold", "mean TTFT", "", "p90 TTFT", "",
        "in time", "", "in time, 0.2 s", "", "rejected", "",
    )  # fmt: skip
    body = [["", "first", "", "", "", "best", *(["Algorithm 1", "moonserve"] * 5)]]
    for row in rows:
        theirs, ours = row["algorithm_1"], row["moonserve"]
        cells = [
            row["trace"],
            f"{row['requests']:,.0f}",
            f"{row['speedup']:g}×",
            f"{row['prefill']} + {row['decode']}",
            row["admission"],
            f"{row['threshold']:g}",
        ]
        for name in ("mean_ttft_s", "p90_ttft_s"):
            ratio = row["ratios"][name]
            cells += [f"{theirs[name]:.2f}", f"{ours[name]:.2f} ({ratio - 1:+.0%})"]
        for name in ("effective_0.1", "effective_0.2"):
            ratio = row["ratios"][name]
            cells += [f"{theirs[name]:.0f}", f"{ours[name]:.0f} ({ratio - 1:+.1%})"]
        cells += [f"{theirs['rejected']:.0f}", f"{ours['rejected']:.0f}"]
        body.append(cells)
    return table(headers, body)


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the claims, each with the rows that miss it."""
    twice = [r for r in rows if r["speedup"] == 2.0 and r["admission"] == "none"]
    overloads = [r for r in rows if _is_overloaded(r)]
    worse = [text for row in rows for text in _worse(row)]
    return [
        _verdict(
            f"Mean TTFT at least {1 - MEAN_BAR:.0%} lower at twice the speed",
            [_name(r) for r in twice if r["ratios"]["mean_ttft_s"] > MEAN_BAR],
        ),
        _verdict(
            f"At least {GOODPUT_BAR - 1:.0%} more in time where Algorithm 1 has fewer than {OVERLOADED:.0%} in time",
            [_name(r) for r in overloads if r["ratios"]["effective_0.1"] < GOODPUT_BAR],
        ),
        _verdict(f"Nothing more than {WORSE_BAR:.0%} worse", worse),
    ]


def _last_percent(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows with a worse p99, the price of the better means. It is not part of the claims."""
    pairs = ((row, row["algorithm_1"]["p99_ttft_s"], row["moonserve"]["p99_ttft_s"]) for row in rows)
    found = [
        f"{_name(row)} {theirs:.0f} → {ours:.0f} s" for row, theirs, ours in pairs if ours > (1 + WORSE_BAR) * theirs
    ]
    return f"- p99 of the TTFT is worse in: {'; '.join(found) or 'no row'}."


def _verdict(claim: str, misses: Sequence[str]) -> str:
    return f"- {claim}: {'met' if not misses else 'missed: ' + '; '.join(misses)}."


def _is_overloaded(row: Mapping[str, Any]) -> bool:
    return bool(row["algorithm_1"]["effective_0.1"] < OVERLOADED * row["requests"])


def _worse(row: Mapping[str, Any]) -> list[str]:
    ratios = row["ratios"]
    slower = [n for n in ("mean_ttft_s", "p90_ttft_s") if ratios[n] > 1 + WORSE_BAR]
    fewer = [n for n in ("effective_0.1", "effective_0.2") if ratios[n] < 1 - WORSE_BAR]
    return [f"{_name(row)}: {name} {ratios[name] - 1:+.1%}" for name in (*slower, *fewer)]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['trace']} {row['speedup']:g}×, {row['prefill']} + {row['decode']}, {row['admission']}"


def _ablations(figures: Mapping[str, Mapping[str, float]]) -> str:
    headers = ("terms", "mean TTFT", "p50", "p90", "p99", "in time", "blocks fetched", "prefill, s")
    return table(
        headers,
        [
            [
                name,
                *(f"{row[f'{each}_ttft_s']:.2f}" for each in ("mean", "p50", "p90", "p99")),
                f"{row['effective_0.1']:.0f}",
                f"{row['blocks_fetched']:,.0f}",
                f"{row['device_s']:,.0f}",
            ]
            for name, row in figures.items()
        ],
    )
