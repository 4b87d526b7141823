"""`moonserve top`: shows the cluster live in the terminal. Asks the gateway once a second; Ctrl-C ends it.

If stdout is not a terminal, it prints one view and ends.
"""

import contextlib
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moonserve.deploy.terminal import EXIT_OK, KEY_ENV, add_url_option, bar, cluster_view, fetch, run, size
from moonserve.protocol.errors import MoonserveError, Unauthenticated
from moonserve.protocol.process.progress_bars import ProgressBars

_SILENT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Bodies of `/v1/cluster` and `/v1/figures`, requested at about the same time."""

    cluster: Mapping[str, Any]
    figures: Mapping[str, Any]


def render(now: Snapshot, earlier: Snapshot | None) -> RenderableType:
    """Returns the whole view, for one screen."""
    parts: list[RenderableType] = [_heading(now), _requests(now, earlier), _instances(now)]
    parts += [part for part in (_rails(now, earlier), _prefixes(now), _refusals(now)) if part]
    return Group(*parts)


def rate(now: Snapshot, earlier: Snapshot | None, total: str) -> float | None:
    """Returns the increase of a total per second; None without an earlier moment."""
    if earlier is None:
        return None
    seconds = now.figures["at_s"] - earlier.figures["at_s"]
    counted = now.figures["totals"].get(total, 0) - earlier.figures["totals"].get(total, 0)
    return max(0.0, counted / seconds) if seconds > 0 else None


def _heading(now: Snapshot) -> Text:
    ready = now.cluster["ready"]
    text = Text("moonserve  ", style="bold")
    text.append("ready" if ready else "not ready", style="green" if ready else "red")
    text.append(f"  {', '.join(now.cluster['models'])}", style="dim")
    return text


def _requests(now: Snapshot, earlier: Snapshot | None) -> Table:
    """Returns the table of requests by phase, their latencies with objectives, prefix hits and throughput."""
    figures, totals = now.figures, now.figures["totals"]
    table = make_table()
    phases = "  ".join(f"{name} {count}" for name, count in figures["phases"].items())
    table.add_row("requests", phases)
    for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s")):
        table.add_row(name, _latency(figures[key], figures["slo"][key]))
    prompt, cached = totals["prompt_tokens"], totals["cached_tokens"]
    hit = f"{cached / prompt:.1%} of {prompt:,} prompt tokens" if prompt else "no prompt yet"
    table.add_row("prefix hits", hit)
    finished, tokens = rate(now, earlier, "finished"), rate(now, earlier, "output_tokens")
    if finished is not None and tokens is not None:
        table.add_row("throughput", f"{finished:.1f} requests/s  {tokens:.0f} tokens/s")
    return table


def _latency(summary: Mapping[str, Any], objective_s: float | None) -> Text:
    if not summary["count"]:
        return Text("none in the last minute", style="dim")
    text = Text()
    for name in ("p50", "p95", "p99"):
        missed = bool(objective_s) and summary[name] > objective_s
        text.append(f"{name} ", style="dim")
        text.append(f"{_milliseconds(summary[name])}  ", style="red" if missed else "")
    if objective_s:
        text.append(f"objective {_milliseconds(objective_s)}", style="dim")
    return text


def _instances(now: Snapshot) -> Table:
    table = make_table("instance", "role", "state", ">waiting", ">running", "KV in use", "prefix blocks")
    for instance in now.cluster["instances"]:
        load, is_store = instance["load"], instance["role"] == "store"
        table.add_row(
            instance["instance_id"],
            instance["role"],
            _state(instance),
            "" if is_store else str(load["num_waiting"]),
            "" if is_store else str(load["num_running"]),
            "" if (share := _fill(instance)) is None else f"{bar(share)} {share:4.0%}",
            f"{instance['indexed_blocks']:,}",
        )
    return table


def _state(instance: Mapping[str, Any]) -> Text:
    if instance["draining"]:
        return Text("draining", style="yellow")
    if instance["last_heard_s"] > _SILENT_S:
        return Text(f"silent {instance['last_heard_s']:.0f} s", style="red")
    return Text("up", style="green")


def _fill(instance: Mapping[str, Any]) -> float | None:
    """Returns the share of the instance's KV memory that is in use; None if it has reported no capacity."""
    load = instance["load"]
    if instance["role"] == "store":
        capacity = load["capacity_bytes"]
        return 1 - load["free_bytes"] / capacity if capacity else None
    blocks = instance["num_blocks"]
    return (load["held_blocks"] + load["leased_blocks"]) / blocks if blocks else None


def _rails(now: Snapshot, earlier: Snapshot | None) -> Table | None:
    if not now.figures["rails"]:
        return None
    table = make_table("transfers", "rail", "read", "written", "per second", "failed")

    def key(rail: Mapping[str, Any]) -> tuple[str, str, str]:
        return rail["process"], rail["transport"], rail["rail"]

    def moved(rail: Mapping[str, Any]) -> int:
        return int(rail["read_bytes"]) + int(rail["written_bytes"])

    before = {key(rail): moved(rail) for rail in earlier.figures["rails"]} if earlier else {}
    seconds = now.figures["at_s"] - earlier.figures["at_s"] if earlier else 0.0
    for rail in now.figures["rails"]:
        speed = ""
        if key(rail) in before and seconds > 0:
            speed = f"{size(max(0, moved(rail) - before[key(rail)]) / seconds)}/s"
        name = f"{rail['transport']} {rail['rail']}".strip()
        read, written = size(rail["read_bytes"]), size(rail["written_bytes"])
        table.add_row(rail["process"], name, read, written, speed, str(rail["failures"]))
    return table


def _prefixes(now: Snapshot) -> Table | None:
    if not now.figures.get("prefixes"):
        return None
    table = make_table("hot prefix", "tokens", "uses", "held by")
    for prefix in now.figures["prefixes"]:
        holders = ", ".join(prefix["holders"])
        table.add_row(prefix["key"][:12], f"{prefix['tokens']:,}", f"{prefix['heat']:.1f}", holders)
    return table


def _refusals(now: Snapshot) -> Text | None:
    words = [*_counted("rejected", now.figures["rejections"])]
    words += _counted("failed", now.figures["failures"])
    return Text("  ".join(words), style="yellow") if words else None


def _counted(what: str, counts: Mapping[str, int]) -> Iterator[str]:
    for reason, count in sorted(counts.items(), key=lambda entry: -entry[1]):
        yield f"{what} {reason}: {count}"


def make_table(*columns: str) -> Table:
    """Returns a table. A `>` before a column's name aligns it right. Without columns there is no header."""
    made = Table(box=None, pad_edge=False, header_style="dim", show_header=bool(columns))
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return made


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1.0 else f"{seconds:,.2f} s"


_LEAST_INTERVAL_S = 0.2


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `top`."""
    console = Console(highlight=False)
    key = environ.get(KEY_ENV, "")

    def body(arguments: Namespace) -> int:
        with ProgressBars(lines=False) as progress, progress.busy(f"asking {arguments.url}"):
            earlier = _fetch_snapshot(arguments.url, key)
        if arguments.once or not console.is_terminal:
            console.print(render(earlier, None))
            return EXIT_OK
        with contextlib.suppress(KeyboardInterrupt):
            interval_s = max(arguments.interval, _LEAST_INTERVAL_S)
            _follow(console, arguments.url, key, interval_s, earlier)
        return EXIT_OK

    return run(_parser(environ), argv, body)


def _fetch_snapshot(url: str, key: str) -> Snapshot:
    return Snapshot(cluster=cluster_view(url, key), figures=fetch(url, "/v1/figures", key))


def _follow(console: Console, url: str, key: str, interval_s: float, earlier: Snapshot) -> None:
    """Updates the view until interrupted. Retries while the gateway does not answer."""
    with Live(render(earlier, None), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = _fetch_snapshot(url, key)
            except Unauthenticated:
                raise
            except MoonserveError as error:
                live.update(Text(f"{error}; trying again", style="red"), refresh=True)
                continue
            live.update(render(now, earlier), refresh=True)
            earlier = now


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve top",
        description="Shows instances, queues, latencies, caches and transfers, live. Ctrl-C ends it.",
        epilog=f"The API key is read from {KEY_ENV}. exit codes: 0 shown; 2 usage or wrong key; 3 no gateway answers",
    )
    add_url_option(parser, environ)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two updates")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    return parser
