"""`moonserve explain ID`: shows why a request was placed on its instances, and the outcome.

Asks the gateway, which knows the names that clients give to requests.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from moonserve.deploy.terminal import EXIT_OK, KEY_ENV, Output, Table, add_url_option, count, fetch, run

_TIMEOUT_S = 30.0  # the gateway asks the conductors and the workers


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `explain`."""

    def body(arguments: Namespace) -> int:
        path = f"/v1/requests/{quote(arguments.id, safe='')}/explain"
        explanation = fetch(arguments.url, path, environ.get(KEY_ENV, ""), timeout_s=_TIMEOUT_S)
        output = Output("explain", as_json=arguments.json)
        output.record(**explanation)
        show(explanation, output)
        return EXIT_OK

    return run(_parser(environ), argv, body)


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve explain",
        description="Shows every candidate of a request's placements, what was chosen, and what then happened.",
        epilog=f"The API key is read from {KEY_ENV}. exit codes: 0 explained; 1 not known; 2 usage or wrong key; "
        "3 no gateway, conductor or worker could be reached",
    )
    parser.add_argument("id", help="the `id` of a reply's body, or its header x-request-id")
    add_url_option(parser, environ)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


Record = Mapping[str, Any]
_CHOSEN = "→"
_REPORTED = {"queue": "queue", "load and transfer": "transfer", "compute": "prefill"}


def show(explanation: Record, output: Output) -> None:
    """Prints one section per placement decision: for each choice of the request, and each attempt after a loss."""
    for position, decision in enumerate(explanation["decisions"]):
        if position:
            output.line()
        _heading(decision, output)
        output.line()
        _show_prefill_candidates(decision, output)
        output.line()
        _show_decode_candidates(decision, output)
        output.line()
        if decision["undivided_candidates"]:
            _show_local_prefill_candidates(decision, output)
            output.line()
        _ending(decision, output)


def _heading(decision: Record, output: Output) -> None:
    output.line(f"{decision['request_id']}: {count(decision['num_prompt_tokens'], 'prompt token')}")
    threshold = decision["balancing_threshold"]
    policy = decision["policy"] + ("" if threshold is None else f", balancing threshold {threshold:g}")
    output.line(f"placed by {policy}; longest prefix in a store {decision['best_blocks']} blocks")
    output.line(_fairness_text(decision["turn"], decision["rank"], decision["priority"]))
    if expected := decision.get("expected_return"):  # an older conductor has none
        output.line(f"the session's next request is expected {expected}")
    if decision["excluded_instances"]:
        output.line(f"excluded, because they failed this request: {', '.join(decision['excluded_instances'])}")


def _fairness_text(turn: Record, rank: float, priority: int) -> str:
    """Describes the request's tenant, the tenant's lead over its share, and the effect on the request's place."""
    who = f"tenant {turn['tenant'] or '(none)'}, weight {turn['weight']:g}"
    ahead = f"{turn['ahead_tokens']:,.0f} tokens ahead of who has had least"
    place = f", {seconds(-rank)} before its arrival" if rank < 0 else ""
    urgency = f", priority {priority}" if priority else ""
    return f"{who}, {ahead}{place}{urgency}"


def _show_prefill_candidates(decision: Record, output: Output) -> None:
    candidates = decision["prefill_candidates"]
    # Only some policies predict the wait that a request adds to others. A column of zeros would claim that it is zero.
    added = [">others wait"] if any(each["added_s"] for each in candidates) else []
    table = Table(
        output, " ", "prefill", ">device", ">prefix", ">reused", ">queue", ">load", ">transfer",
        ">compute", ">TTFT", *added,
    )  # fmt: skip
    for each in candidates:
        table.add(
            _mark(each, "" if decision["is_undivided"] else decision["prefill"]),
            each["instance_id"],
            *(str(each[f"{name}_blocks"]) for name in ("device", "prefix", "reuse")),
            *(seconds(each[f"{name}_s"]) for name in ("queue", "load", "transfer", "prefill")),
            seconds(each["ttft_s"]),
            *([seconds(each["added_s"])] if added else []),
        )
    table.flush()
    for store, first, number in decision["sources"]:
        output.line(f"  blocks {first} to {first + number - 1} from {store}")


def _show_decode_candidates(decision: Record, output: Output) -> None:
    table = Table(output, " ", "decode", ">sequences", ">context", ">free", ">needed", "fits", ">TBT")
    for each in decision["decode_candidates"]:
        table.add(
            _mark(each, decision["decode"]),
            each["instance_id"],
            *(f"{each[name]:,.0f}" for name in ("landing_seqs", "landing_tokens", "free_blocks")),
            f"{each['needed_blocks']:,}",
            _fits(each),
            seconds(each["landing_tbt_s"]),
        )
    table.flush()


def _show_local_prefill_candidates(decision: Record, output: Output) -> None:
    """Prints the decode instances that could prefill the prompt themselves."""
    table = Table(
        output, " ", "decode, prefilling", ">reused", ">queue", ">load", ">steps", ">step", ">added to it", ">TTFT",
        "within both limits",
    )  # fmt: skip
    chosen = decision["decode"] if decision["is_undivided"] else ""
    for each in decision["undivided_candidates"]:
        table.add(
            _mark(each, chosen),
            each["instance_id"],
            str(each["reuse_blocks"]),
            *(seconds(each[f"{name}_s"]) for name in ("queue", "load")),
            str(each["num_steps"]),
            *(seconds(each[f"{name}_s"]) for name in ("step", "added", "ttft")),
            "yes" if each["keeps_slo"] else "no",
        )
    table.flush()


def _ending(decision: Record, output: Output) -> None:
    rejection, outcome = decision["rejection"], decision["outcome"]
    if rejection is not None:
        output.line(f"rejected: {rejection['reason']}; again after {seconds(rejection['retry_after_s'])}")
    elif outcome is None:
        output.line("in progress: no token has been reported yet")
    else:
        output.line(_summary(outcome))
    table = Table(output, "", ">predicted", ">limit", ">actual")
    actual_ttft, actual_tbt = (None, None) if outcome is None else actual(outcome)
    for name, happened in (("TTFT", actual_ttft), ("TBT", actual_tbt)):
        key = name.lower()
        figures = (decision[f"predicted_{key}_s"], decision[f"{key}_slo_s"], happened)
        table.add(name, *map(seconds, figures))
    for name, predicted, happened in _terms(decision, outcome):
        table.add(f"  {name}", seconds(predicted), "", seconds(happened))
    table.flush()
    if (tbt_s := decision.get("tbt_range_s")) is not None:  # an older conductor has none
        output.line(f"TBT of 8 in 10 such requests: {seconds(tbt_s[0])} to {seconds(tbt_s[1])}")
    if (tokens := decision.get("output_range")) is not None:
        output.line(f"tokens of 8 in 10 such answers: {tokens[0]:,} to {tokens[1]:,}")


def _terms(decision: Record, outcome: Record | None) -> list[tuple[str, float, float | None]]:
    """Returns name, prediction and report of each part of the TTFT at the chosen instance; empty without a report."""
    reports = [None if outcome is None else outcome[f"{name}_s"] for name in _REPORTED.values()]
    if not any(report is not None for report in reports):
        return []
    undivided = decision["is_undivided"]
    kind, name = ("undivided", "decode") if undivided else ("prefill", "prefill")
    candidates = {each["instance_id"]: each for each in decision[f"{kind}_candidates"]}
    chosen = candidates[decision[name]]
    load_s = chosen["load_s"] + (0.0 if undivided else chosen["transfer_s"])
    predicted = (chosen["queue_s"], load_s, chosen["prefill_s"])
    return list(zip(_REPORTED, predicted, reports, strict=True))


def actual(outcome: Record) -> tuple[float | None, float | None]:
    """Returns the seconds to the first token and the mean seconds between tokens; None if not reported."""
    ttft_s, elapsed_s, tokens = (outcome[key] for key in ("ttft_s", "elapsed_s", "output_tokens"))
    if ttft_s is None or elapsed_s is None or not tokens or tokens < 2:
        return ttft_s, None
    return ttft_s, (elapsed_s - ttft_s) / (tokens - 1)


def _summary(outcome: Record) -> str:
    if outcome["phase"] == "first_token":
        return "in progress: the first token has been reported"
    tokens = count(outcome["output_tokens"] or 0, "token")
    cached = count(outcome["cached_tokens"] or 0, "prompt token")
    after = seconds(outcome["elapsed_s"])
    guessed = outcome.get("num_draft_tokens", 0)  # an older conductor has none
    drafts = f"; {outcome['num_accepted_tokens']} of {count(guessed, 'guessed token')} were right" if guessed else ""
    return f"{outcome['phase']} after {after} with {tokens}; the KV of {cached} was re-used{drafts}"


def _mark(candidate: Record, chosen: str) -> str:
    return _CHOSEN if candidate["instance_id"] == chosen else ""


def _fits(candidate: Record) -> str:
    if not candidate["fits"]:
        return "no: blocks"
    return "yes" if candidate["has_slot"] else "no: slots"


def seconds(value: float | None) -> str:
    """Formats seconds as `1.25 s`, `13.2 ms`, `0`, or `-` for an unknown value."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
