"""Output of the trace commands: text tables and files, with clear errors if a file cannot be written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigError


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Converts an OSError of the block into a ConfigError that names `what`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {what}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file, creating its folder. Raises ConfigError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a text table. The first column is left-aligned, the others are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
