"""What the launcher shows where nothing can be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.display import Display
from deploy.plan import ProcessSpec
from deploy.supervisor import Child


def test_what_a_full_disk_does_not_take_is_not_seen_and_ends_nothing(tmp_path: Path) -> None:
    """Who follows a process tells the display of it, and must go on following."""
    child = Child(ProcessSpec(instance_id="it", module="it", flags=()), tmp_path / "it.log")
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails, and is looked at
    display = Display(full)
    display.show_start(tmp_path, tmp_path)
    display.follow([child])
    for stage in ("ready", "restarting"):
        child.stage = stage
        display.refresh()
    display.show_stopping()
    display.close()
    with pytest.raises(OSError, match="No space left"):
        full.close()
