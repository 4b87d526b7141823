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


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_what_is_written_is_read_back(profile: Any, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "profile.json", measured={"clock": "cpu"})
    assert read_profile(tmp_path / "profile.json") == profile
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_fields_with_defaults_may_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, disk_tokens=None, max_num_seqs=None, measured=None)
    assert read_profile(path).max_num_seqs == 256


def test_a_pool_may_be_empty_and_a_whole_rate_is_a_rate(tmp_path: Path) -> None:
    profile = read_profile(written(tmp_path, dram_tokens=0, nic_bytes_per_s=10**9))
    assert (profile.dram_tokens, profile.nic_bytes_per_s) == (0, 1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, FORMAT),
        ({"nic_bytes_per_s": None, "prefill": None}, "nic_bytes_per_s, prefill must be given"),
        ({"dram_token": 5}, "did you mean dram_tokens"),
        ({"nic_bytes_per_s": 0}, "nic_bytes_per_s must be above 0"),
        ({"nic_bytes_per_s": "fast"}, "nic_bytes_per_s must be a number"),
        ({"nic_bytes_per_s": float("nan")}, "nic_bytes_per_s must be a number"),
        ({"disk_bytes_per_s": float("inf")}, "disk_bytes_per_s must be a number"),
        ({"num_layers": True}, "num_layers must be a whole number"),
        ({"device_tokens": 1.5}, "device_tokens must be a whole number"),
        ({"dram_tokens": -1}, "dram_tokens must be above 0"),
        ({"name": ""}, "name must be a text"),
        ({"prefill": {"c0": 1}}, "prefill must be c0, c1 and c2"),
        ({"decode": {"c0": -1, "c1": 0, "c2": 1}}, "decode: profile coefficients must be"),
        ({"decode": {"c0": "1", "c1": 0, "c2": 1}}, "decode: c0, c1 and c2 must be numbers"),
        ({"decode": {"c0": 0, "c1": 0, "c2": 0}}, "one of them above 0"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "\x00"])
def test_files_that_are_no_profile_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        read_profile(path)


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_profile(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot write"):
        write_profile(_ANY, tmp_path / "absent" / "profile.json")


def test_what_serving_adds_is_read_back_and_checked(tmp_path: Path) -> None:
    """Overheads and crowding are part of the file; what is wrong in them is named."""
    profile = replace(
        _ANY,
        overheads=Overheads(request_s=0.01, handoff_s=0.002),
        crowding=Crowding(
            prefill=(1.0, 1.25), decode=(1.0,), landing=(1.0, 4.0), gaps=((1.0,), (0.0, 2.0))
        ),
    )
    write_profile(profile, tmp_path / "serving.json")
    assert read_profile(tmp_path / "serving.json") == profile


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"overheads": {"reply_s": 1}},
            "overheads may have back_s, gateway_s, handoff_s, landing_s, late_back_s, request_s, turnover_s",
        ),
        ({"overheads": {"landing_s": -1}}, "none below 0"),
        ({"crowding": {"prefill": [1, 0]}}, "crowding: prefill must be a list of factors above 0"),
        ({"crowding": {"gaps": [1]}}, "gaps must be a list of lists"),
        ({"crowding": {"gaps": [[0, 0]]}}, "none below 0 and some above"),
        (
            {"crowding": [1, 2]},
            "crowding may have decode, decode_batch, gaps, handoff, landing, ",
        ),
    ],
)
def test_wrong_serving_terms_are_named(changes: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_profile(written(tmp_path, **changes))
