"""Persistent identity of a process: its id, and the owner token with which a restarted process takes it over at once.

It is kept in one file in the process's folder. The file is never partly written. Two processes that create it at the
same time get the same identity. A folder with another id than the configured one is an error, because the other data
in it belongs to that id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

FILE_NAME = "identity.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a process. `owner` and `last_epoch` become part of the member that joins."""

    instance_id: str
    owner: str = field(default_factory=lambda: secrets.token_hex(16))
    last_epoch: int = 0
    """Highest epoch that this process has had, so that the next is above it even if the registry lost its memory."""
    folder: Path | None = None

    def with_epoch(self, epoch: int) -> Identity:
        """Returns the identity with this epoch and saves it in the folder, if there is one.

        Blocks until it is on disk. Raises OSError if that fails."""
        later = dataclasses.replace(self, last_epoch=max(epoch, self.last_epoch))
        if self.folder is not None:
            with _written(later) as fresh:
                os.replace(fresh, self.folder / FILE_NAME)
            _sync_folder(self.folder)
        return later


def load_or_create(folder: Path | None, wanted_id: str) -> Identity:
    """Returns the identity in `folder` and creates it on first use. Without a folder it lasts as long as the process.

    Raises ConfigError if the folder belongs to another id or cannot be used, or if its file is damaged.
    """
    if folder is None:
        return Identity(instance_id=wanted_id)
    try:
        identity = _load(folder) if (folder / FILE_NAME).exists() else _create(folder, wanted_id)
    except OSError as error:
        raise ConfigError(f"cannot keep this process's identity in {folder}: {error}") from error
    if identity.instance_id != wanted_id:
        raise ConfigError(
            f"{folder} belongs to {identity.instance_id}, not to {wanted_id}: start with that id, or give "
            f"{wanted_id} another folder (or delete {folder / FILE_NAME} to hand the folder over to it)"
        )
    return identity


def _create(folder: Path, wanted_id: str) -> Identity:
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(instance_id=wanted_id, folder=folder)
    # Unlike a rename, a link fails if another process was first. Then that process's file is used.
    with _written(identity) as fresh, contextlib.suppress(FileExistsError):
        os.link(fresh, folder / FILE_NAME)
    _sync_folder(folder)
    return _load(folder)


def _load(folder: Path) -> Identity:
    path = folder / FILE_NAME
    try:
        entry: dict[str, Any] = json.loads(path.read_text())
        instance_id, owner, last_epoch = (
            entry["instance_id"],
            entry["owner"],
            entry.get("last_epoch", 0),
        )
        if not (isinstance(instance_id, str) and isinstance(owner, str) and owner):
            raise ValueError("not an identity")
        return Identity(instance_id=instance_id, owner=owner, last_epoch=int(last_epoch), folder=folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged; delete it, and this process gets a new identity "
            "(it may then have to wait for its old lease to end)"
        ) from error


@contextlib.contextmanager
def _written(identity: Identity) -> Iterator[Path]:
    """Writes the identity to a temporary file on disk, readable by its owner only, and removes it after the block."""
    assert identity.folder is not None
    path = identity.folder / f".{FILE_NAME}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            kept = {"instance_id": identity.instance_id, "owner": identity.owner}
            json.dump({**kept, "last_epoch": identity.last_epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flushes the folder, so that the name of the file is on disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
