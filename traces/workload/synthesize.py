"""`moonserve traces synthesize --out FILE`: from options, from a preset, or in the likeness of a trace.

Records are written one by one as JSON lines of the public format. A file is written completely or not at all.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import Any

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command
from moonserve.traces.format import TraceRecord, read_checked
from moonserve.traces.output import explain_write_errors
from moonserve.traces.workload.generator import (
    PRESETS,
    PROCESSES,
    ArrivalSpec,
    WorkloadSpec,
    parse_distribution,
    requests_of,
)
from moonserve.traces.workload.likeness import fit_trace, records_like


@dataclass(frozen=True, kw_only=True)
class SynthesizeConfig:
    """Options of `moonserve traces synthesize`. A distribution is a number, lognormal:MEAN:SIGMA or empirical:FILE."""

    out: str = option(help="file to write, JSON lines")
    like: str | None = option(None, help="a trace whose statistics to reproduce")
    preset: str | None = option(None, help="figures of the published traces", choices=tuple(PRESETS))
    requests: int | None = option(
        None, help="number of requests; without --duration that of the preset or the given trace"
    )
    duration: float | None = option(None, help="seconds; requests after that are left out")
    rate: float | None = option(None, help="requests per second, mean")
    arrivals: str | None = option(
        None, help="gaps between requests; with --like those of the given trace", choices=PROCESSES
    )
    burstiness: float | None = option(None, help="deviation / mean of gamma gaps; 1 is Poisson")
    diurnal_amplitude: float | None = option(
        None, help="how far the rate swings, from 0 to 1; begins at the quietest moment"
    )
    diurnal_period_s: float | None = option(None, help="seconds from one such moment to the next")
    seed: int = option(0, help="equal seeds and options give equal traces")
    input_tokens: str | None = option(
        None, help="distribution of a first prompt, without its system prompt or document"
    )
    output_tokens: str | None = option(None, help="distribution of answers")
    max_input_tokens: int | None = option(None, help="sessions end before a longer prompt")
    system_share: float | None = option(None, help="share of threads with a system prompt")
    system_prompts: int | None = option(None, help="number of different ones")
    system_zipf: float | None = option(None, help="exponent of their popularity; 0: all alike")
    system_tokens: str | None = option(None, help="distribution of their lengths")
    session_share: float | None = option(None, help="share of threads that are sessions")
    turns: float | None = option(None, help="mean number of turns (geometric)")
    turn_tokens: str | None = option(None, help="distribution of what a later turn adds")
    think_s: str | None = option(None, help="distribution of seconds from a request to the next")
    document_share: float | None = option(
        None, help="share of threads that are documents; neither document nor session: one request"
    )
    questions: float | None = option(None, help="mean number of questions (geometric)")
    document_tokens: str | None = option(None, help="distribution of documents' lengths")
    question_tokens: str | None = option(None, help="distribution of questions' lengths")


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, the arguments after `synthesize`."""
    return run_command(SynthesizeConfig, run, argv, prog="moonserve traces synthesize")


def run(config: SynthesizeConfig) -> int:
    """Writes the trace and returns the exit code. Raises ConfigError."""
    _check(config)
    records, usual = _like(config) if config.like else _described(config)
    wanted = config.requests if config.requests or config.duration else usual
    number = write_trace(Path(config.out), bounded(records, wanted, config.duration))
    print(f"{number:,} requests written to {config.out}")
    return 0


def _check(config: SynthesizeConfig) -> None:
    """Raises ConfigError for options that contradict each other or are out of range."""
    if config.requests is not None and config.requests < 1:
        raise ConfigError("--requests must be at least 1")
    if config.duration is not None and not 0 < config.duration < float("inf"):
        raise ConfigError("--duration must be above 0 seconds")
    for name in ("preset", *_given(config, WorkloadSpec)) if config.like else ():
        if getattr(config, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} and --like exclude each other: the given trace says that")
    if config.burstiness is not None and config.arrivals != "gamma":
        raise ConfigError("--burstiness is for --arrivals gamma")


def _described(config: SynthesizeConfig) -> tuple[Iterator[TraceRecord], int]:
    """Returns endless records of the described workload, and its default number of requests."""
    spec = PRESETS[config.preset] if config.preset else WorkloadSpec()
    changes = _given(config, WorkloadSpec)
    for name, value in changes.items():
        if isinstance(value, str):
            changes[name] = parse_distribution(value, f"--{name.replace('_', '-')}")
    spec = dataclasses.replace(spec, **{**changes, "arrivals": dataclasses.replace(spec.arrivals, **_arrivals(config))})
    spec.check()
    return requests_of(spec, Random(config.seed)), spec.num_requests


def _like(config: SynthesizeConfig) -> tuple[Iterator[TraceRecord], int]:
    """Returns endless records in the likeness of the given trace, and its number of requests."""
    fitted = fit_trace(read_checked(Path(config.like or "")))
    rate = 1.0 if config.rate is None else config.rate / fitted.rate
    if not 0 < rate < math.inf:
        raise ConfigError("--rate must be above 0")
    given = _arrivals(config)
    arrivals = ArrivalSpec(**{"rate": fitted.rate, **given}) if given.keys() - {"rate"} else None
    if arrivals is not None:
        arrivals.check()
    records = records_like(fitted, Random(config.seed), rate=rate, arrivals=arrivals)
    return records, fitted.num_requests


def _arrivals(config: SynthesizeConfig) -> dict[str, Any]:
    """Returns the given fields of `ArrivalSpec`."""
    process = {} if config.arrivals is None else {"process": config.arrivals}
    return {**_given(config, ArrivalSpec), **process}


def _given(config: SynthesizeConfig, spec: type[WorkloadSpec | ArrivalSpec]) -> dict[str, Any]:
    """Returns the options that are named like fields of `spec` and have a value, without `arrivals`."""
    names = {field.name for field in dataclasses.fields(spec)} - {"arrivals"}
    values = {name: getattr(config, name, None) for name in sorted(names)}
    return {name: value for name, value in values.items() if value is not None}


def bounded(
    records: Iterator[TraceRecord], num_requests: int | None, duration_s: float | None
) -> Iterator[TraceRecord]:
    """Returns the records up to a number or before a time, whichever comes first. None = no such limit."""
    if duration_s is not None:
        records = takewhile(lambda record: record.arrived_s < duration_s, records)
    return islice(records, num_requests)


def write_trace(path: Path, records: Iterable[TraceRecord]) -> int:
    """Writes a trace and returns its number of requests. Raises ConfigError if the file cannot be written or is empty.

    A pipe or a device is written directly, because it cannot be replaced.
    """
    if path.is_dir():
        raise ConfigError(f"cannot write the trace {path}: it is a folder")
    is_special = path.exists() and not path.is_file()
    with explain_write_errors(f"the trace {path}"):
        number = _write(path, records) if is_special else _replace(path, records)
    if not number:
        raise ConfigError("not one request comes in that time; make --duration or --rate larger")
    return number


def _replace(path: Path, records: Iterable[TraceRecord]) -> int:
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        number = _write(partial, records)
        if number:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return number


def _write(path: Path, records: Iterable[TraceRecord]) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(line_of(record))
            number += 1
    return number


def line_of(record: TraceRecord) -> str:
    """Returns one line in the public traces' format. Times are truncated to milliseconds, which keeps their order."""
    ids = ", ".join(map(str, record.hash_ids))
    return (
        f'{{"timestamp": {int(record.arrived_s * 1000)}, "input_length": {record.input_length}, '
        f'"output_length": {record.output_length}, "hash_ids": [{ids}]}}\n'
    )
