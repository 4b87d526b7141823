"""Writes records as JSON lines of the public format, one by one; a file is there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path

from protocol.errors import ConfigError
from traces.format import TraceRecord
from traces.output import writing


def bounded(
    records: Iterator[TraceRecord], num_requests: int | None, duration_s: float | None
) -> Iterator[TraceRecord]:
    """The records up to a number or before an instant, whichever comes first; None: no such bound."""
    if duration_s is not None:
        records = takewhile(lambda record: record.arrived_s < duration_s, records)
    return islice(records, num_requests)


def write_trace(path: Path, records: Iterable[TraceRecord]) -> int:
    """Returns the number of requests. Raises ConfigError when the file cannot be written, or there are none.

    A pipe or a device is written as it is, since it cannot be replaced.
    """
    if path.is_dir():
        raise ConfigError(f"cannot write the trace {path}: it is a folder")
    with writing(f"the trace {path}"):
        number = _write(path, records) if _is_special(path) else _replace(path, records)
    if not number:
        raise ConfigError("not one request comes in that time; make --duration or --rate larger")
    return number


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


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
    """One line, as the public traces have it. Times are cut to milliseconds, which keeps their order."""
    ids = ", ".join(map(str, record.hash_ids))
    return (
        f'{{"timestamp": {int(record.arrived_s * 1000)}, "input_length": {record.input_length}, '
        f'"output_length": {record.output_length}, "hash_ids": [{ids}]}}\n'
    )
