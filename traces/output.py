"""Output of the trace commands: text tables and files, with clear errors if a file cannot be written."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moonserve.protocol.errors import ConfigError


@contextmanager
def explain_write_errors(what: object) -> Iterator[None]:
    """Converts an OSError of the block into a ConfigError that names `what`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {what}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file, creating its folder. Raises ConfigError."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a text table. The first column is left-aligned, the others are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


# Formats numbers for tables and axes. Missing values are a dash.

NO_VALUE = "–"

_SI_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def format_count(value: float) -> str:
    """Formats a count: 12,031."""
    return f"{value:,.0f}"


def format_percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def format_ms(value: float) -> str:
    """Formats with one decimal below 100, otherwise with none."""
    if not math.isfinite(value):
        return NO_VALUE
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def format_ms_as_seconds(value_ms: float) -> str:
    """Formats milliseconds as seconds, with three decimals below 1, otherwise with two."""
    if not math.isfinite(value_ms):
        return NO_VALUE
    value = value_ms / 1000
    return f"{value:,.3f}" if abs(value) < 1 else f"{value:,.2f}"


def format_scaled(value: float) -> str:
    """Formats a counter of any size: 512, 0.25, 12.3 M."""
    if not math.isfinite(value):
        return NO_VALUE
    if abs(value) < 100_000:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
    step = min(int(math.log10(abs(value)) // 3), len(_SI_PREFIXES) - 1)
    return f"{value / 1000**step:.4g} {_SI_PREFIXES[step]}"


def format_tick(value: float, _position: object = None) -> str:
    """Formats a number on an axis: 0.01, 1, 30, 5k, 2M. Avoids mathematical notation, whose glyphs few fonts have."""
    for step in range(len(_SI_PREFIXES) - 1, 0, -1):
        if abs(value) >= 1000**step:
            return f"{value / 1000**step:g}{_SI_PREFIXES[step]}"
    return f"{value:g}"
