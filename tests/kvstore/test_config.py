"""What a store node and the directory refuse before they start."""

from __future__ import annotations

import contextlib

import pytest

from kvstore.config import StoreConfig
from kvstore.directory.config import DirectoryConfig
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


@pytest.mark.parametrize(
    ("registry", "is_own"),
    [
        ("127.0.0.1:7100", True),
        ("localhost:7100", True),
        ("moonserve://127.0.0.1:7100", True),
        ("redis://127.0.0.1:7100", False),
        ("127.0.0.1:7101", False),
        ("10.0.0.1:7100", False),
    ],
)
def test_a_directory_is_not_told_to_follow_itself(registry: str, is_own: bool) -> None:
    """Which the variable that kvctl reads would do, in the shell that a directory is started from."""
    own = ("--instance-id", "directory", "--port", "7100")
    environ = {"MOONSERVE_CLUSTER_TOKEN": "token", "MOONSERVE_REGISTRY": registry}
    with pytest.raises(ConfigError, match="MOONSERVE_REGISTRY") if is_own else contextlib.nullcontext():
        assert load(DirectoryConfig, own, prog="directory", environ=environ).registry == registry
