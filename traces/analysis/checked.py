"""Reading a trace that is to be measured: the laws of the format are checked, line by line.

A replay may forgive a trace that breaks them; a measure of it would be wrong without a word. Knows nothing of measures.
"""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

from protocol.errors import ConfigError
from traces.format import TOKENS_PER_HASH, TraceRecord, numbered_records


def read_checked(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """The first `limit` records. Raises ConfigError with the line at fault and what to do about it."""
    records: list[TraceRecord] = []
    earlier_s = 0.0
    for number, record in islice(numbered_records(path), limit):
        fault = _fault(record, earlier_s)
        if fault is not None:
            raise ConfigError(f"{path}:{number}: {fault}")
        records.append(record)
        earlier_s = record.arrived_s
    if not records:
        raise ConfigError(f"the trace {path} holds no requests")
    return records


def _fault(record: TraceRecord, earlier_s: float) -> str | None:
    """What breaks a law of the format, if anything does."""
    if not math.isfinite(record.arrived_s) or record.arrived_s < 0:
        return "timestamp is no number of milliseconds from 0 up"
    if record.arrived_s < earlier_s:
        return "timestamp is earlier than the line before; sort the trace by timestamp"
    needed = -(-record.input_length // TOKENS_PER_HASH)
    if len(record.hash_ids) != needed:
        return (
            f"input_length {record.input_length} needs {needed} hash ids of {TOKENS_PER_HASH} "
            f"tokens, and there are {len(record.hash_ids)}; convert the trace to that block size"
        )
    return None
