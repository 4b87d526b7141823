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
from deploy.ports import free_port
from tests.patience import PATIENCE_S


def test_help_lists_every_verb_and_verbs_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)
    for verb in ("serve", "gateway", "conductor", "store"):
        assert main([verb, "--help"]) == 0
        assert "--port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serv"], "did you mean serve"),
        (["worker"], "--role"),
        (["worker", "--role", "x"], "--role"),
        (["worker", "--role-switching", "x"], "--role-switching"),
        (["worker", "--role=decode", "--conditional-disaggregation=x"], "--conditional"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "is_read", "code"), [("--help", False, 141), ("serv", True, 2)])
def test_the_command_ends_with_its_exit_code_and_no_traceback_where_nobody_reads(
    argument: str, is_read: bool, code: int
) -> None:
    read_fd, write_fd = os.pipe()
    if not is_read:
        os.close(read_fd)  # before it has printed anything
    process = subprocess.Popen([sys.executable, "-m", "deploy", argument], stdout=write_fd, stderr=subprocess.PIPE)
    os.close(write_fd)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, told.count(b"\n")) == (code, int(is_read))


BROKEN = '{"hidden_size": 1,\n oops'
MAMBA = json.dumps({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    ("arguments", "config", "words"),
    [
        (["/no/such/model"], None, ["/no/such/model"]),
        (["{folder}"], BROKEN, ["config.json", "line 2"]),
        (["{folder}"], MAMBA, ["MambaForCausalLM", "LlamaForCausalLM"]),
        (["--port", "{port}"], None, ["--port"]),
        (["--prefil-workers", "2"], None, ["--prefill-workers"]),
    ],
)
def test_what_cannot_be_served_is_one_line_that_names_it(
    arguments: list[str], config: str | None, words: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        known = {"folder": tmp_path, "port": taken.getsockname()[1]}
        assert main(["serve", *(each.format(**known) for each in arguments)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    [line] = printed.err.strip().splitlines()
    assert all(word in line for word in words)
