"""`moonserve deploy` where there is no Ray cluster: what can be said without one, and what is told instead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.cli import main as moonserve
from deploy.ray.command import EXIT_USAGE, main
from deploy.ray.driver import INSTALL, connect
from protocol.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "deploy" / "clusters"


def test_a_file_is_checked_without_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert moonserve(["deploy", "ray", "--check", str(EXAMPLES / "gpu.yaml")]) == 0
    assert "gpu.yaml is in order" in capsys.readouterr().out


def test_a_wrong_file_is_told_before_ray_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefil: {count: 2}\n")
    assert main(["ray", "--address", "nowhere:1", str(path)]) == EXIT_USAGE
    assert "did you mean prefill?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["scale"], ["frobnicate"], ["drain"]])
def test_a_wrong_verb_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_USAGE
    assert "usage: moonserve deploy" in capsys.readouterr().err


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb in ("ray", "status", "logs", "scale", "restart", "drain", "down"):
        assert f"\n    {verb} " in shown


def test_without_the_extra_the_line_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as raised:
        connect("auto")
    assert INSTALL in str(raised.value)
