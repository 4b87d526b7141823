"""`moonserve replay`: sends a trace's requests to an endpoint at their recorded times and reports the results."""

import asyncio
import json
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.traces.client import ModelInfo, Outcome, StreamClient
from moonserve.traces.format import TraceRecord, read_trace
from moonserve.traces.output import write_text
from moonserve.traces.request_metrics import CompletedRequest, latency_metrics, ratio, request_metrics, spread_ms
from moonserve.traces.workload.prompts import PromptBuilder, ideal_cached_tokens

# The report of a replay: a table for the terminal and a JSON object for programs.
#
# Field names follow `vllm bench serve`. Rejected and failed requests count as misses of the objectives and are
# reported next to the latencies, because rejecting requests makes latencies better.


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request of a replay and its result."""

    lateness_s: float  # delay of the client's own sending
    ideal_cached_tokens: int
    input_length: int
    outcome: Outcome


def build_report(
    sent: Sequence[RequestResult], *, duration_s: float, ttft_slo_s: float, tbt_slo_s: float
) -> dict[str, Any]:
    """Returns the figures of a replay. Latencies are in milliseconds and cover the requests that succeeded."""
    done = [s.outcome for s in sent if s.outcome.succeeded]
    completed = [_completed(each, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s) for each in done]
    gaps_s = [gap for each in done if each.timeline for gap in each.timeline.gaps_s]
    return {
        **request_metrics(
            completed,
            num_requests=len(sent),
            num_rejected=sum(s.outcome.rejected for s in sent),
            duration_s=duration_s,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
        ),
        "ideal_hit_ratio": ratio(
            sum(s.ideal_cached_tokens for s in sent if s.outcome.succeeded),
            sum(s.input_length for s in sent if s.outcome.succeeded),
        ),
        **latency_metrics(completed),
        **spread_ms("itl_ms", gaps_s),
        **spread_ms("lateness_ms", (s.lateness_s for s in sent)),
        "errors": _errors(sent),
    }


def _completed(outcome: Outcome, *, ttft_slo_s: float, tbt_slo_s: float) -> CompletedRequest:
    """Converts a successful outcome. Without tokens it has no latencies and is not effective."""
    timeline = outcome.timeline
    several = timeline is not None and len(timeline.token_at) > 1
    return CompletedRequest(
        input_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=len(timeline.token_at) if timeline else 0,
        ttft_s=timeline.ttft_s if timeline else None,
        tbt_s=timeline.tbt_s if timeline and several else None,
        tpot_s=timeline.tpot_s if timeline and several else None,
        e2e_s=timeline.e2e_s if timeline else None,
        is_effective=timeline is not None and timeline.meets(ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s),
    )


def _errors(sent: Sequence[RequestResult]) -> dict[str, int]:
    """Returns the number of occurrences of each error, including rejections."""
    outcomes = (entry.outcome for entry in sent)
    return Counter(f"{o.status}: {o.error[:200]}" for o in outcomes if o.error is not None)


def format_report(report: dict[str, Any]) -> str:
    """Formats the report as a table for a terminal."""
    lines = [
        "requests     {num_requests:>8}   completed {completed}  rejected {rejected}  failed {failed}",
        "duration     {duration:>8.1f} s",
        "throughput   {request_throughput:>8.2f} requests/s   {output_throughput:.0f} output tokens/s   "
        "{total_token_throughput:.0f} tokens/s",
        "goodput      {request_goodput:>8.2f} requests/s   {effective_fraction:.1%} of all meet "
        "TTFT <= {ttft_slo_s:g} s and TBT <= {tbt_slo_s:g} s",
        "hit ratio    {hit_ratio:>8.1%}   ideal {ideal_hit_ratio:.1%} (unlimited cache)",
    ]
    text = [line.format_map(report) for line in lines]
    text.append(f"{'':12} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9}")
    for name in ("ttft", "tbt", "tpot", "itl", "e2el", "lateness"):
        cells = [report[f"{kind}_{name}_ms"] for kind in ("mean", "p50", "p90", "p99")]
        text.append(f"{name + ' ms':12}" + "".join(f" {cell:>9.1f}" for cell in cells))
    text += [f"error        {count:>8} × {what}" for what, count in report["errors"].items()]
    return "\n".join(text)


_MAX_PROMPTS_AHEAD = 64  # prompts: more than most bursts have; a few MiB at most


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Options of `moonserve replay`."""

    trace: str = option(help="trace file, JSON lines")
    url: str = option("http://127.0.0.1:8000", help="OpenAI-compatible endpoint")
    model: str | None = option(None, help="model to ask for; the endpoint's first when not given")
    limit: int | None = option(None, help="send only this many requests, the first ones")
    scale_lengths: float = option(1.0, help="factor on prompt lengths")
    scale_outputs: float = option(1.0, help="factor on output lengths")
    speedup: float = option(1.0, help="factor on the trace's clock")
    ttft_slo: float = option(30.0, help="objective for the first token, seconds")
    tbt_slo: float = option(0.1, help="objective between tokens, seconds")
    timeout: float = option(600.0, help="seconds after which a request counts as failed")
    seed: int = option(0, help="of the prompts' tokens")
    api_key: str | None = option(None, help="key to present", masked=True)
    output: str | None = option(None, help="write the report as JSON to this file")


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, the arguments after `replay`. The first one may be the trace."""
    return run_command(ReplayConfig, run, argv, prog="moonserve replay", positional="--trace")


def run(config: ReplayConfig) -> int:
    """Replays the trace, prints the report and returns the exit code. Raises ConfigError."""
    report = uvloop.run(replay(config))
    print(format_report(report))
    if config.output:
        write_text(Path(config.output), json.dumps(report, indent=2) + "\n")
    return 0 if report["completed"] else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Results of a trace's requests, in trace order."""

    sent: Sequence[RequestResult]
    duration_s: float  # from the start of the replay to the end of the last request


async def replay(config: ReplayConfig) -> dict[str, Any]:
    """Replays the trace and returns the report. Raises ConfigError for an invalid trace, option or endpoint."""
    replayed = await send_trace(config)
    return build_report(
        replayed.sent,
        duration_s=replayed.duration_s,
        ttft_slo_s=config.ttft_slo,
        tbt_slo_s=config.tbt_slo,
    )


async def send_trace(config: ReplayConfig) -> ReplayResult:
    """Replays the trace and returns the raw results. Raises like `replay`."""
    records = _records(config)
    async with StreamClient(config.url, api_key=config.api_key, timeout_s=config.timeout) as client:
        facts = await client.model(config.model)
        _check_fit(records, facts)
        builder = PromptBuilder(facts.vocab_size or 0, config.seed)
        ideal = ideal_cached_tokens(records, facts.block_size or records[0].tokens_per_hash)
        tasks: list[asyncio.Task[RequestResult]] = []
        num_ended = 0
        with ProgressBars() as progress:

            def show(_: object = None) -> None:
                text = f"{num_ended:,} of {len(records):,} requests, {len(tasks) - num_ended:,} in flight"
                elapsed_s = time.monotonic() - began_at
                # If requests go on ending at the rate, per arrival, at which they have ended so far.
                all_s = max(records[-1].arrived_s, elapsed_s) * len(tasks) / num_ended if num_ended else elapsed_s
                progress.show("replaying", num_ended, len(records), text, all_s - elapsed_s)

            def end(_: object) -> None:
                nonlocal num_ended
                num_ended += 1
                show()

            began_at = time.monotonic()
            async with asyncio.TaskGroup() as group:
                async for index, prompt in _due_prompts(records, builder, began_at):
                    sending = _send_request(client, facts.name, records[index], prompt, ideal[index], began_at)
                    tasks.append(group.create_task(sending))
                    tasks[-1].add_done_callback(end)
                    show()
            duration_s = time.monotonic() - began_at
    return ReplayResult(sent=[task.result() for task in tasks], duration_s=duration_s)


async def _due_prompts(
    records: Sequence[TraceRecord], builder: PromptBuilder, began_at: float
) -> AsyncIterator[tuple[int, list[int]]]:
    """Yields each record's index and prompt when it is due, in trace order even for simultaneous records, because the
    first of a burst decides which requests a long prompt delays. Prompts are built ahead while there is time."""
    ahead: deque[list[int]] = deque()
    for index, record in enumerate(records):
        due_at = began_at + record.arrived_s
        while (num_built := index + len(ahead)) < len(records) and len(ahead) < _MAX_PROMPTS_AHEAD:
            if ahead and time.monotonic() >= due_at:
                break
            ahead.append(builder.prompt(records[num_built]))
            await asyncio.sleep(0)  # lets tokens be received meanwhile
        await asyncio.sleep(due_at - time.monotonic())
        yield index, ahead.popleft()


def _tenant_fields(record: TraceRecord) -> dict[str, str | int]:
    """Returns the request fields for the record's tenant and priority."""
    said: dict[str, str | int] = {"user": record.tenant, "priority": record.priority}
    return {name: value for name, value in said.items() if value}


async def _send_request(
    client: StreamClient, model: str, record: TraceRecord, prompt: list[int], ideal_cached: int, began_at: float
) -> RequestResult:
    lateness_s = max(0.0, time.monotonic() - began_at - record.arrived_s)
    outcome = await client.complete(model, prompt, max_tokens=record.output_length, extra=_tenant_fields(record))
    return RequestResult(
        lateness_s=lateness_s,
        ideal_cached_tokens=ideal_cached,
        input_length=record.input_length,
        outcome=outcome,
    )


def _records(config: ReplayConfig) -> list[TraceRecord]:
    for name in ("scale_lengths", "scale_outputs", "speedup"):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if config.limit is not None and config.limit < 1:
        raise ConfigError("--limit must be at least 1")
    records = read_trace(Path(config.trace), config.limit)
    return [r.scaled(config.scale_lengths, config.scale_outputs, config.speedup) for r in records]


def _check_fit(records: Sequence[TraceRecord], facts: ModelInfo) -> None:
    """Raises ConfigError if any request is too long for the model or the endpoint reports no vocabulary size."""
    if facts.vocab_size is None:
        raise ConfigError("the endpoint's /v1/models tells no vocab_size to build prompts from")
    longest = max(record.input_length + record.output_length for record in records)
    if facts.max_model_len is not None and longest > facts.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens and the model takes {facts.max_model_len}; "
            "make them shorter with --scale-lengths and --scale-outputs, or fewer with --limit"
        )
