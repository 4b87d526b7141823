"""`moonserve replay`: sends a trace's requests to an endpoint at their recorded times and reports the results."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from protocol.config import option, run_command
from protocol.errors import ConfigError
from protocol.progress import Progress
from traces.client import ModelFacts, StreamClient
from traces.format import TraceRecord, read_trace
from traces.output import write_text
from traces.prompts import PromptBuilder, ideal_cached_tokens
from traces.report import Sent, build_report, format_report

_BUILT_AHEAD = 64  # prompts: more than most bursts have; a few MiB at most


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
class Replayed:
    """Results of a trace's requests, in trace order."""

    sent: Sequence[Sent]
    duration_s: float  # from the start of the replay to the end of the last request


async def replay(config: ReplayConfig) -> dict[str, Any]:
    """Replays the trace and returns the report. Raises ConfigError for an invalid trace, option or endpoint."""
    replayed = await send(config)
    return build_report(
        replayed.sent,
        duration_s=replayed.duration_s,
        ttft_slo_s=config.ttft_slo,
        tbt_slo_s=config.tbt_slo,
    )


async def send(config: ReplayConfig) -> Replayed:
    """Replays the trace and returns the raw results. Raises like `replay`."""
    records = _records(config)
    async with StreamClient(config.url, api_key=config.api_key, timeout_s=config.timeout) as client:
        facts = await client.model(config.model)
        _check_fit(records, facts)
        builder = PromptBuilder(facts.vocab_size or 0, config.seed)
        ideal = ideal_cached_tokens(records, facts.block_size or records[0].tokens_per_hash)
        tasks: list[asyncio.Task[Sent]] = []
        ends = itertools.count(1)
        with Progress() as progress:

            def one_more(_: object) -> None:
                num_ended = next(ends)
                text = f"{num_ended:,} of {len(records):,} requests"
                progress.show("replaying", num_ended, len(records), text)

            began_at = time.monotonic()
            async with asyncio.TaskGroup() as group:
                async for index, prompt in _paced(records, builder, began_at):
                    sending = _Sending(records[index], prompt, ideal[index], began_at)
                    tasks.append(group.create_task(_send(client, facts.name, sending)))
                    tasks[-1].add_done_callback(one_more)
            duration_s = time.monotonic() - began_at
    return Replayed(sent=[task.result() for task in tasks], duration_s=duration_s)


class _Sending(NamedTuple):
    record: TraceRecord
    prompt: list[int]
    ideal_cached: int  # tokens
    began_at: float  # start of the replay


async def _paced(
    records: Sequence[TraceRecord], builder: PromptBuilder, began_at: float
) -> AsyncIterator[tuple[int, list[int]]]:
    """Yields each record's index and prompt when it is due, in trace order even for simultaneous records, because the
    first of a burst decides which requests a long prompt delays. Prompts are built ahead while there is time."""
    ahead: deque[list[int]] = deque()
    for index, record in enumerate(records):
        due_at = began_at + record.arrived_s
        while (num_built := index + len(ahead)) < len(records) and len(ahead) < _BUILT_AHEAD:
            if ahead and time.monotonic() >= due_at:
                break
            ahead.append(builder.prompt(records[num_built]))
            await asyncio.sleep(0)  # lets tokens be received meanwhile
        await asyncio.sleep(due_at - time.monotonic())
        yield index, ahead.popleft()


def _whose(record: TraceRecord) -> dict[str, str | int]:
    """Returns the request fields for the record's tenant and priority."""
    said: dict[str, str | int] = {}
    if record.tenant:
        said["user"] = record.tenant
    if record.priority:
        said["priority"] = record.priority
    return said


async def _send(client: StreamClient, model: str, sending: _Sending) -> Sent:
    record = sending.record
    lateness_s = max(0.0, time.monotonic() - sending.began_at - record.arrived_s)
    outcome = await client.complete(model, sending.prompt, max_tokens=record.output_length, extra=_whose(record))
    return Sent(
        lateness_s=lateness_s,
        ideal_cached_tokens=sending.ideal_cached,
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


def _check_fit(records: Sequence[TraceRecord], facts: ModelFacts) -> None:
    """Raises ConfigError if any request is too long for the model or the endpoint reports no vocabulary size."""
    if facts.vocab_size is None:
        raise ConfigError("the endpoint's /v1/models tells no vocab_size to build prompts from")
    longest = max(record.input_length + record.output_length for record in records)
    if facts.max_model_len is not None and longest > facts.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens and the model takes {facts.max_model_len}; "
            "make them shorter with --scale-lengths and --scale-outputs, or fewer with --limit"
        )
