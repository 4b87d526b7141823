"""Settings that a store node and the directory refuse at start, such as more memory than the machine has available."""

import contextlib
from pathlib import Path

import pytest

from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.directory.config import DirectoryConfig
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import load_config
from moonserve.protocol.process.machine import available_memory_bytes
from tests.patience import PATIENCE_S
from tests.processes import run_module


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
def test_invalid_settings_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        load_config(StoreConfig, ["--instance-id", "s", *flags], prog="kvstore", environ={})


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
    """A directory refuses its own address as registry, which its shell may set in MOONSERVE_REGISTRY for kvctl."""
    own = ("--instance-id", "directory", "--port", "7100")
    environ = {"MOONSERVE_CLUSTER_TOKEN": "token", "MOONSERVE_REGISTRY": registry}
    with pytest.raises(ConfigError, match="MOONSERVE_REGISTRY") if is_own else contextlib.nullcontext():
        assert load_config(DirectoryConfig, own, prog="directory", environ=environ).registry == registry


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 100 kB\nMemAvailable: 80 kB\nSwapFree: 8 kB\n", "max\n", 88 * 1024),
        ("MemTotal: 100 kB\nMemAvailable: 80 kB\n", "4096\n", 4096),
        ("MemAvailable: 4 kB\n", "1000000\n", 4096),
        ("", "4096", 4096),
        ("nothing of use\n\n", "max", None),
        (None, None, None),
    ],
)
def test_available_memory_is_the_smaller_of_machine_and_control_group(
    tmp_path: Path, meminfo: str | None, limit: str | None, expected: int | None
) -> None:
    if meminfo is not None and limit is not None:
        (tmp_path / "meminfo").write_text(meminfo)
        (tmp_path / "limit").write_text(limit)
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path / "limit") == expected


def test_a_node_with_more_memory_than_there_is_ends_before_it_takes_any() -> None:
    """A node with more DRAM than is available exits with an error, before the kernel kills it or other processes."""
    arguments = ("store", "--instance-id", "huge", "--dram", "100TiB")
    ended = run_module("moonserve", *arguments, timeout_s=PATIENCE_S, MOONSERVE_CLUSTER_TOKEN="token")
    assert ended.returncode == 2
    assert "--dram" in ended.stderr
    assert "GiB" in ended.stderr
    assert "Traceback" not in ended.stderr
