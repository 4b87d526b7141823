"""Model profiles as files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from traces.simulator.profiles import FORMAT, PROFILES, read_profile, write_profile
from traces.simulator.spec import Crowding, Overheads

_ANY = next(iter(PROFILES.values()))


def written(folder: Path, **changes: Any) -> Path:
    """A file that is right but for these fields; None = left out."""
    path = folder / "profile.json"
    write_profile(_ANY, path, measured={"points": [1, 2]})
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return path


def test_what_is_written_is_read_back_and_defaults_may_be_left_out(tmp_path: Path) -> None:
    """Overheads and crowding too. A pool may be empty, and a whole rate is a rate."""
    profile = replace(
        _ANY,
        dram_tokens=0,
        overheads=Overheads(request_s=0.01, handoff_s=0.002),
        crowding=Crowding(prefill=(1.0, 1.25), decode=(1.0,), gaps=((1.0,), (0.0, 2.0))),
    )
    write_profile(profile, tmp_path / "profile.json", measured={"clock": "cpu"})
    assert read_profile(tmp_path / "profile.json") == profile
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    path = written(tmp_path, disk_tokens=None, max_num_seqs=None, nic_bytes_per_s=10**9)
    assert read_profile(path) == replace(_ANY, max_num_seqs=256, nic_bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, FORMAT),
        ({"nic_bytes_per_s": None, "prefill": None}, "prefill: Field required; nic_bytes_per_s: "),
        ({"dram_token": 5}, "dram_token: "),
        ({"nic_bytes_per_s": 0}, "nic_bytes_per_s: Input should be greater than 0"),
        ({"nic_bytes_per_s": "1"}, "nic_bytes_per_s: "),
        ({"nic_bytes_per_s": float("nan")}, "nic_bytes_per_s: "),
        ({"disk_bytes_per_s": float("inf")}, "disk_bytes_per_s: "),
        ({"device_tokens": 1.5}, "device_tokens: "),
        ({"dram_tokens": -1}, "dram_tokens: "),
        ({"name": ""}, "name: "),
        ({"prefill": {"c0": 1}}, "prefill.c1: Field required"),
        ({"decode": {"c0": -1, "c1": 0, "c2": 1}}, "profile coefficients must be"),
        ({"decode": {"c0": 0, "c1": 0, "c2": 0}}, "must be above 0"),
        ({"overheads": {"reply_s": 1}}, "overheads.reply_s: "),
        ({"overheads": {"landing_s": -1}}, "overheads.landing_s: "),
        ({"crowding": {"prefill": [1, 0]}}, "crowding.prefill.1: "),
        ({"crowding": {"gaps": [1]}}, "crowding.gaps.0: "),
    ],
)
def test_what_is_wrong_is_named_with_the_file(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_files_that_are_no_profile_or_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for content in ("", "{", "[]", "\x00"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            read_profile(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_profile(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot write"):
        write_profile(_ANY, tmp_path / "absent" / "profile.json")
