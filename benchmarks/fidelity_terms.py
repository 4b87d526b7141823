"""Terms of each request's TTFT, live, simulated and predicted: rows of a CSV file, and summaries.

The terms are the ones of Algorithm 1 as reported by prefill workers (queue, load, prefill), `before`: from the client's
sending to the placement, and `rest`: submission and the first token's way back. They add up to the TTFT at the client.
The module knows decisions as JSON and journeys of the simulator, but no cluster.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.timeline import percentile
from traces.report import Sent
from traces.simulator.journey import Journey

Row = dict[str, float]
_PREDICTED = ("ttft", "queue", "load", "prefill")  # names in `_row` without the prefixes "live_" and "predicted_"


def rows_of(
    sent: Sequence[Sent], decisions: Sequence[Mapping[str, Any] | None], journeys: Sequence[Journey]
) -> list[Row]:
    """Returns a row for each request that both sides completed, in milliseconds and tokens, in the trace's order."""
    return [
        _row(request, decision, journey)
        for request, decision, journey in zip(sent, decisions, journeys, strict=True)
        if request.outcome.timeline is not None
        and journey.first_token_at is not None
        and decision is not None
        and _is_told(decision.get("outcome") or {})
    ]


def _is_told(outcome: Mapping[str, Any]) -> bool:
    return outcome.get("prefill_s") is not None and outcome.get("ttft_s") is not None


def _row(sent: Sent, decision: Mapping[str, Any], journey: Journey) -> Row:
    outcome = decision["outcome"]
    timeline = sent.outcome.timeline
    assert timeline is not None, "it completed"
    assert journey.first_token_at is not None, "it completed"
    chosen = next(c for c in decision["prefill_candidates"] if c["instance_id"] == decision["prefill"])
    terms_s = outcome["queue_s"] + outcome["transfer_s"] + outcome["prefill_s"]
    seconds = {
        "arrived": journey.record.arrived_s,
        "live_ttft": timeline.ttft_s,
        "live_before": timeline.ttft_s - outcome["ttft_s"],
        "live_queue": outcome["queue_s"],
        "live_load": outcome["transfer_s"],
        "live_prefill": outcome["prefill_s"],
        "live_rest": outcome["ttft_s"] - terms_s,
        "live_placed_ttft": outcome["ttft_s"],
        "simulated_ttft": journey.first_token_at - journey.record.arrived_s,
        "simulated_queue": journey.queue_s,
        "simulated_load": journey.load_s,
        "simulated_prefill": journey.prefill_s,
        "predicted_ttft": decision["predicted_ttft_s"],
        "predicted_queue": chosen["queue_s"],
        "predicted_load": chosen["load_s"] + chosen["transfer_s"],
        "predicted_prefill": chosen["prefill_s"],
    }
    return {
        "index": journey.index,
        "tokens": journey.record.input_length,
        "live_cached": sent.outcome.cached_tokens,
        "simulated_cached": journey.cached_tokens,
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows({name: round(value, 3) for name, value in row.items()} for row in rows)


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean of every column except `index`."""
    names = [name for name in rows[0] if name != "index"] if rows else []
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def prediction_errors(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the p50 of |predicted − actual| ÷ actual TTFT from placement on, for the TTFT and for each term."""
    errors = {}
    for name in _PREDICTED:
        actual = "live_placed_ttft_ms" if name == "ttft" else f"live_{name}_ms"
        off = [abs(r[f"predicted_{name}_ms"] - r[actual]) / r["live_placed_ttft_ms"] for r in rows]
        errors[name] = percentile(off, 50) if off else 0.0
    return errors


def lost_hits(rows: Sequence[Row]) -> list[int]:
    """Returns the indices of requests whose numbers of cached tokens differ between replay and simulation."""
    return [int(r["index"]) for r in rows if r["live_cached"] != r["simulated_cached"]]
