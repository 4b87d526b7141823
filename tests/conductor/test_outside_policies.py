"""Policies of users' own are found by file or module, and what cannot be used is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from conductor.policies import make_policy
from conductor.policies.least_loaded import LeastLoaded
from conductor.policies.outside import load_policy
from protocol.errors import ConfigError

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from conductor.policies.base import predict_unfetched

@dataclass
class Mine:
    name: str = "mine"
    balancing_threshold: float | None = None
    by_session: bool = False

    def weigh(self, prompt, offers):
        return predict_unfetched(prompt, offers)

class Weighless:
    name = "weightless"
    by_session = False

class Broken:
    def __init__(self) -> None:
        raise RuntimeError("not today")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "random.py"  # as a module of Python's is called
    path.write_text(SOURCE)
    return path


def test_a_policy_is_found_in_a_file(source: Path) -> None:
    policy = make_policy(f"{source}:Mine", 1.25)
    assert (policy.name, policy.by_session) == ("mine", False)


def test_a_file_hides_no_module(source: Path) -> None:
    import random

    load_policy(f"{source}:Mine")
    import random as again

    assert again is random
    assert random.Random(0).random() < 1


def test_a_policy_is_found_in_an_installed_module() -> None:
    policy = make_policy("conductor.policies.least_loaded:LeastLoaded", 1.25)
    assert isinstance(policy, LeastLoaded)


def test_a_changed_file_is_read_again(source: Path) -> None:
    assert make_policy(f"{source}:Mine", 1.25).name == "mine"
    source.write_text(SOURCE.replace('"mine"', '"changed"'))
    assert make_policy(f"{source}:Mine", 1.25).name == "changed"


@pytest.mark.parametrize(
    ("class_name", "reason"),
    [
        ("Nobody", "AttributeError: module .* has no attribute 'Nobody'"),
        ("Broken", "RuntimeError: not today"),
        ("Weighless", "has no balancing_threshold, weigh; conductor/policies/base.py"),
    ],
)
def test_what_is_no_policy_is_refused(source: Path, class_name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_policy(f"{source}:{class_name}")


@pytest.mark.parametrize("name", ["nowhere.py:Mine", "no.such.module:Mine", ":Mine", "a.py:"])
def test_what_is_nowhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        make_policy(name, 1.25)
