"""Tests that every public name of the version before still works: flags, metrics, HTTP endpoints and fields.

`python -m tests.docs.test_names` records the names of a release.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from docs.reference import configuration, metrics
from moonserve.gateway.http.routes import routes_of
from moonserve.protocol.process.config import options_of

RECORDED = Path(__file__).with_name("names.txt")


def names() -> Iterator[str]:
    for command, cls in configuration.PAGES:
        yield from (f"{command} {option.flag}" for option in options_of(cls))
    for line in asyncio.run(metrics.render()).splitlines():
        if line.startswith("| `"):
            name, kind, labels, _ = line[2:].split(" | ", 3)
            yield f"metric {name} {kind} {labels}"
    for route in routes_of(*[MagicMock()] * 5):
        document = route.document()
        yield f"{route.method} {route.path}"
        yield from (f"{route.method} {route.path} {field}" for field in _fields(document.get("requestBody")))
        yield from (f"{route.method} {route.path} {field} of the reply" for field in _fields(document["responses"]))


def _fields(schema: Any) -> set[str]:
    """Returns the names of all properties, at any depth."""
    if isinstance(schema, list):
        return {name for part in schema for name in _fields(part)}
    if not isinstance(schema, dict):
        return set()
    own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return own | {name for part in schema.values() for name in _fields(part)}


def test_the_public_names_of_the_version_before_still_work() -> None:
    assert not set(RECORDED.read_text().splitlines()) - set(names())


if __name__ == "__main__":
    RECORDED.write_text("\n".join(sorted(set(names()))) + "\n")
