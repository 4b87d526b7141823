"""What commands of traces print and write: tables, files, and a clear word where one cannot be written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigError


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raises ConfigError that names `what` where the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {what}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Makes its folder. Raises ConfigError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
