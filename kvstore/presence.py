"""When a node with a folder was last in touch with its cluster, over its restarts: how long it was away.

Within one boot the time since boot tells, whatever the wall clock did; over a reboot the wall clock has to, and where
that went backwards nobody knows. Blocks for a few bytes of disk; what cannot be written makes an absence look longer.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "presence.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """An instant, as far as this machine can tell it again later."""

    boot: str
    boot_s: float  # since boot, suspension included
    wall_s: float

    @classmethod
    def now(cls) -> Stamp:
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return cls(boot=boot, boot_s=time.clock_gettime(time.CLOCK_BOOTTIME), wall_s=time.time())

    def until(self, later: Stamp) -> float | None:
        """Seconds; None = they cannot be known."""
        if self.boot and self.boot == later.boot:
            return max(later.boot_s - self.boot_s, 0.0)
        passed_s = later.wall_s - self.wall_s
        return passed_s if passed_s >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The last time that a node was in touch, and how much of the removals before it knew then."""

    at: Stamp
    covered_s: float


class Presence:
    """The file in one folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def read(self) -> Seen | None:
        """None when there is none that can be read."""
        try:
            entry = json.loads(self._path.read_text())
            return Seen(at=Stamp(**entry["at"]), covered_s=float(entry["covered_s"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, covered_s: float) -> None:
        """Raises OSError. It need not outlast a loss of power: an older one says a longer absence."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(Seen(at=Stamp.now(), covered_s=covered_s))))
        os.replace(fresh, self._path)
