"""docs/fidelity.md: what `benchmarks.fidelity` found, as a page. Pure; knows no cluster and no simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measure import table

BAR = 0.15
LENGTHS = 1 / 16  # of the trace's, like the next
OUTPUTS = 1 / 8
FIGURES = {
    "p50_ttft_ms": "TTFT p50, ms",
    "p90_ttft_ms": "TTFT p90, ms",
    "p50_itl_ms": "TBT p50, ms",
    "hit_ratio": "hit ratio",
    "request_throughput": "requests/s",
}
# Beside the claim: what one would look at next.
MORE_FIGURES = {
    "p99_ttft_ms": "TTFT p99, ms",
    "p90_itl_ms": "TBT p90, ms",
    "p50_tpot_ms": "mean of a request's gaps, p50, ms",
    "p50_tbt_ms": "mean of a request's longest tenth of gaps, p50, ms",
    "p50_e2el_ms": "end to end p50, ms",
    "output_throughput": "output tokens/s",
    "prediction_error": "predicted TTFT, p50 of the relative error",
}
PREDICTION_BAR = 0.15
LENGTHS = 1 / 16  # of the trace's, like the next
OUTPUTS = 1 / 8


def as_page(result: dict[str, Any]) -> str:
    """docs/fidelity.md."""
    machine, load = result["machine"], result["load"]
    met, predicted = (
        "met" if all(shape[name] for shape in result["shapes"]) else "NOT met"
        for name in ("met", "predictions_met")
    )
    return "\n".join(
        (
            _INTRODUCTION,
            f"The first {load['requests']} requests of {load['trace']}, {load['speedup']:g} times as fast, prompts at "
            f"1/{1 / LENGTHS:g} and answers at 1/{1 / OUTPUTS:g} of their lengths; the demo model, one thread per "
            f"worker, {machine['cores']} cores, load {machine['load']:g} at the end.",
            *_remark(machine),
            "",
            *(_section(shape) for shape in result["shapes"]),
            f"The claim, {BAR:.0%} for the first five rows of each table, is {met}. That half of the live TTFTs are "
            f"predicted to {PREDICTION_BAR:.0%} is {predicted}.",
            "",
            _READING,
        )
    )


def _remark(machine: dict[str, Any]) -> Sequence[str]:
    """The run itself keeps about as many processes busy as there are cores."""
    if machine["load"] <= 2 * machine["cores"]:
        return ()
    return (
        "",
        "**Other programs had most of the processor while this was measured**: tokens reached the client several at "
        "once, so that gaps say little, and predictions were late. Measure again on an idle machine.",
    )


def _section(shape: dict[str, Any]) -> str:
    rows = []
    for name, title in {**FIGURES, **MORE_FIGURES}.items():
        live, simulated, error = (shape[key][name] for key in ("live", "simulated", "errors"))
        within = ("yes" if abs(error) <= BAR else "NO") if name in FIGURES else ""
        rows.append([title, _figure(live), _figure(simulated), f"{error:+.1%}", within])
    terms = shape["profile"]
    return "\n".join(
        (
            f"## {shape['prefill']} prefill, {shape['decode']} decode",
            "",
            table(["", "live", "simulated", "error", f"within {BAR:.0%}"], rows),
            "",
            "Profile: prefill {} s, decode {} s; ".format(
                *(" / ".join(f"{c:.2e}" for c in terms[part]) for part in ("prefill", "decode"))
            )
            + "request {request_ms:.1f}, landing {landing_ms:.1f}, handoff {handoff_ms:.1f} ms; ".format_map(
                terms
            )
            + "beside 0, 1, … others: prefill {}, decode {}.".format(
                *(
                    ", ".join(f"{factor:.2f}" for factor in terms[f"crowding_{part}"])
                    for part in ("prefill", "decode")
                )
            ),
            "",
        )
    )


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


_INTRODUCTION = """# Does the simulator tell the truth?

One trace, served live and simulated. `python -m benchmarks.fidelity --trace FILE` makes this page: for each shape it
profiles a cluster (`moonserve profile --serving`), replays the trace against a fresh one, and simulates the same
records on the profile. Nothing of the replay goes into the simulation.
"""

_READING = """## What the simulation has, and what it leaves out

| term | measured as |
|---|---|
| prefill, decode formulae | computing as prefill workers report it, steps as a client sees them, each alone |
| request | TTFT less what the prefill worker reports: HTTP, keys, placement, submission, the way back |
| landing | from asking the decode worker for blocks to having them, while it is idle |
| handoff | the second token's gap less a step: last writes, commit, verification |
| crowding | how many times as long a prompt and a step take beside 1, 2, … others that compute on this host |
| mixed steps | not measured: short prompts share steps as `prefill_worker.steps` decides it |

Left out: that a landing waits for the decode worker's step under way; that a gateway at work on a burst's first request
delays the second; a crowd that changes during a chunk (it counts from the next one on); what other programs do.
TBT is each gap between tokens; the trace's hash ids stand for 32 tokens here, so that hits are exact.
"""
