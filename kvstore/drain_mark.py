"""Whether a node is being drained, over its restarts: an empty file in its folder. A node without one starts empty, and
accepts objects again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvstore.disk.identity import sync_folder

log = logging.getLogger(__name__)

FILE_NAME = "draining"


class DrainMark:
    """The mark in one folder, if there is a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE_NAME if folder is not None else None
        self._turn = asyncio.Lock()  # what was asked for last is what stays

    def is_set(self) -> bool:
        """Blocks for a look at the folder."""
        return self._path is not None and self._path.exists()

    async def keep(self, draining: bool) -> None:
        """On disk when it returns; where the disk refuses, this process goes on and the next one does not know."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._write, draining)
            except OSError as error:
                log.error("a restart will not know whether this node is draining: %s", error)

    def _write(self, draining: bool) -> None:
        if self._path is None:
            return
        if draining:
            self._path.touch()
        else:
            self._path.unlink(missing_ok=True)
        sync_folder(self._path.parent)
