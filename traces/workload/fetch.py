"""`moonserve traces fetch`: downloads the public Mooncake traces and verifies their checksums.

The checksum of a file is its git object id, as the hosting repository lists it for the given branch or commit.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.traces.output import explain_write_errors

LISTING = "https://api.github.com/repos/kvcache-ai/Mooncake/contents/FAST25-release/traces"
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Options of `moonserve traces fetch`."""

    into: str = option("traces-data", help="folder to write to")
    ref: str = option("main", help="branch or commit of the Mooncake repository")
    listing: str = option(LISTING, help="URL that lists the files, in GitHub's contents format")
    timeout: float = option(60.0, help="seconds without progress after which to give up")


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, the arguments after `fetch`."""
    return run_command(FetchConfig, run, argv, prog="moonserve traces fetch")


def run(config: FetchConfig) -> int:
    """Downloads the traces and returns the exit code. Raises ConfigError."""
    with explain_write_errors(f"to --into {config.into}"):
        Path(config.into).mkdir(parents=True, exist_ok=True)
    fetch(config)
    return 0


def fetch(config: FetchConfig) -> list[Path]:
    """Downloads missing or changed files into an existing folder. Raises ConfigError; leaves no partial file."""
    try:
        with ProgressBars() as progress:
            listing = f"{config.listing}?ref={quote(config.ref)}"
            with progress.busy("listing"), urlopen(listing, timeout=config.timeout) as reply:
                entries = [each for each in json.load(reply) if each["name"].endswith(".jsonl")]
            return [_fetch_one(entry, config, progress) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot download from {config.listing}: {type(error).__name__}: {error}") from error


def _fetch_one(entry: dict[str, Any], config: FetchConfig, progress: ProgressBars) -> Path:
    path = Path(config.into) / Path(entry["name"]).name
    if path.exists() and git_object_id(path.read_bytes()) == entry["sha"]:
        return path
    content = bytearray()
    with urlopen(entry["download_url"], timeout=config.timeout) as reply:
        while chunk := reply.read(CHUNK_BYTES):
            content += chunk
            text = f"{len(content) / 1e6:.1f} of {entry['size'] / 1e6:.1f} MB"
            progress.show(path.name, len(content), entry["size"], text)
    if git_object_id(bytes(content)) != entry["sha"]:
        raise ConfigError(f"{path.name} arrived damaged: its checksum is not {entry['sha']}")
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def git_object_id(content: bytes) -> str:
    """Returns the id under which git stores a file of this content (hex SHA-1 over a header and the bytes)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
