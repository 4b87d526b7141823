"""The `moonserve` command: verbs, and one clear line for each thing that cannot be started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import VERBS, main
from models import demo_model_path
from tests.patience import PATIENCE_S


def moonserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)


@pytest.mark.parametrize("verb", ["serve", "gateway", "conductor", "store", "replay"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"{'--trace' if verb == 'replay' else '--port'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serv"], "did you mean serve"),
        (["worker"], "--role"),
        (["worker", "--role", "x"], "--role"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


def test_whoever_reads_only_the_beginning_sees_no_traceback() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)  # before it has printed anything
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "--help"], stdout=write_fd, stderr=subprocess.PIPE
    )
    os.close(write_fd)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert told == b""
    assert process.returncode == 141


def refused(*arguments: str) -> str:
    """The one line of a `serve` that could not start."""
    result = moonserve("serve", *arguments)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_missing_model_folder_is_named() -> None:
    assert "/no/such/model" in refused("/no/such/model")


def test_a_broken_config_json_is_named_with_its_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 1,\n oops')
    line = refused(str(tmp_path))
    assert "config.json" in line
    assert "line 2" in line


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    line = refused(str(tmp_path))
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


def test_a_port_in_use_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = refused(str(demo_model_path()), "--port", str(taken.getsockname()[1]))
    assert "--port" in line


def test_an_unknown_flag_suggests_the_nearest() -> None:
    assert "--prefill-workers" in refused("--prefil-workers", "2")
