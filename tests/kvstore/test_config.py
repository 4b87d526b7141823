"""What a store node can be told, and what it refuses before it starts."""

from __future__ import annotations

import pytest

from kvstore.__main__ import main
from kvstore.config import StoreConfig
from protocol.config import EXIT_CONFIG, load
from protocol.errors import ConfigError


def test_sizes_are_written_with_their_unit() -> None:
    config = load(StoreConfig, ["--instance-id", "s", "--dram", "3MiB"], prog="kvstore", environ={})
    assert config.dram == 3 * 2**20
    assert config.watermarks().evict_above == 0.90


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


def test_an_unknown_flag_ends_the_process_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--instance-id", "s", "--drum", "1GiB"]) == EXIT_CONFIG
    assert "--dram" in capsys.readouterr().err
