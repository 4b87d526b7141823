"""What a store node can be told, and what it refuses before it starts."""

from __future__ import annotations

import pytest

from kvstore.config import StoreConfig
from protocol.config import load
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    "flags",
    [
        ["--dram", "100"],
        ["--dram", "many"],
        ["--dram", "inf"],
        ["--evict-above", "1.5"],
        ["--evict-above", "0.5", "--evict-share", "0.6"],
        ["--lease-ttl-s", "0"],
        ["--ssd-sync-interval-s", "-1"],
    ],
)
def test_nonsense_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        load(StoreConfig, ["--instance-id", "s", *flags], prog="kvstore", environ={})
