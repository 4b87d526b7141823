"""The trace format: JSON lines `{"timestamp": ms, "input_length", "output_length", "hash_ids": […]}`.

A hash id stands for 512 prompt tokens, the last one for the remainder. Equal leading ids mean an equal prefix (FAST'25
traces of Mooncake). A record may also have a `tenant` and a `priority`; the published traces have neither.

Analysis uses `read_checked`: a trace that violates the format can be replayed, but would silently distort a measure.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from moonserve.protocol.errors import ConfigError

TOKENS_PER_HASH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """One request of a trace, possibly scaled."""

    arrived_s: float  # since the trace began
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tokens_per_hash: int = TOKENS_PER_HASH
    tenant: str = ""
    priority: int = 0  # lower is more urgent

    def scaled(self, lengths: float, outputs: float, speedup: float) -> "TraceRecord":
        """Returns a copy with scaled lengths and a clock faster by `speedup`. Prefixes are shared as before."""
        return replace(
            self,
            arrived_s=self.arrived_s / speedup,
            input_length=max(1, round(self.input_length * lengths)),
            output_length=max(1, round(self.output_length * outputs)),
            tokens_per_hash=max(1, round(self.tokens_per_hash * lengths)),
        )


def read_trace(path: Path, limit: int | None = None, *, is_checked: bool = False) -> list[TraceRecord]:
    """Returns the first `limit` records. `is_checked`: they must keep the rules of the format. Raises ConfigError with
    the faulty line, the fault and often a remedy."""
    records: list[TraceRecord] = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in islice(lines, limit):
                record = _parse(line, path, number)
                if is_checked and (fault := _fault(record, records[-1].arrived_s if records else 0.0)):
                    raise ConfigError(f"{path}:{number}: {fault}")
                records.append(record)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text file; a trace is JSON lines, unpacked") from error
    if not records:
        raise ConfigError(f"the trace {path} holds no requests")
    return records


read_checked = partial(read_trace, is_checked=True)


def _parse(line: str, path: Path, number: int) -> TraceRecord:
    try:
        entry = json.loads(line)
        record = TraceRecord(
            arrived_s=float(entry["timestamp"]) / 1000,
            input_length=int(entry["input_length"]),
            output_length=int(entry["output_length"]),
            hash_ids=tuple(map(int, entry["hash_ids"])),
            tenant=str(entry.get("tenant", "")),
            priority=int(entry.get("priority", 0)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}:{number} is not a trace record: {error!r}") from error
    if not math.isfinite(record.arrived_s):
        raise ConfigError(f"{path}:{number}: timestamp is no number of milliseconds")
    if record.input_length < 1 or record.output_length < 0 or not record.hash_ids:
        raise ConfigError(f"{path}:{number} has an impossible length or no hash ids")
    return record


def _fault(record: TraceRecord, earlier_s: float) -> str | None:
    """Returns the format rule that the record violates; None = no violation."""
    if record.arrived_s < 0:
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
