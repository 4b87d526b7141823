"""Flags, environment, TOML and defaults, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.config import HelpRequested, effective, load, option, parse_bytes, to_flags
from protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Base:
    depth: float = option(1.5, help="how deep")


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    name: str = option(help="required")
    max_model_len: int | None = option(None, help="length")
    enable_cache: bool = option(True, help="cache")
    names: tuple[str, ...] = option((), help="several")
    dram: int = option(1024, help="memory", unit="bytes")
    mode: str = option("a", help="mode", choices=("a", "b"))
    password: str = option("", help="secret", secret=True)


def parse(*argv: str, environ: dict[str, str] | None = None) -> Example:
    return load(Example, argv, prog="example", environ=environ or {})


def test_every_kind_of_value_is_read_from_flags() -> None:
    config = parse(
        "--name=x", "--max-model-len", "77", "--no-enable-cache", "--names", "p, q",
        "--dram", "2KiB", "--mode", "b", "--depth", "2",
    )  # fmt: skip
    assert config == Example(
        name="x", max_model_len=77, enable_cache=False, names=("p", "q"), dram=2048, mode="b",
        depth=2.0,
    )  # fmt: skip


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\nmode = "b"\nmax-model-len = 5\n')
    environ = {"MOONSERVE_NAME": "env", "MOONSERVE_MODE": "a"}
    config = parse("--config", str(file), "--name", "flag", environ=environ)
    assert (config.name, config.mode, config.max_model_len) == ("flag", "a", 5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nam", "x"], "did you mean --name"),
        (["--name", "x", "--mode", "c"], "one of a, b"),
        (["--name", "x", "--max-model-len", "many"], "--max-model-len"),
        (["--name"], "needs a value"),
        ([], "--name must be given"),
        (["--name", "x", "--password", "p"], "unknown argument"),
        (["--name", "x", "--dram", "1ZiB"], "--dram"),
        (["--config", "/nonexistent.toml"], "cannot read"),
    ],
)
def test_bad_input_is_one_line_that_helps(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nane = 'x'\n", "did you mean name"),
        (b"max-model-len = [1]\n", "--max-model-len"),
        (b"max-model-len = inf\n", "--max-model-len"),
        (b"names = 5\n", "--names"),
        (b"name = '\xff'\n", "not valid TOML"),
    ],
)
def test_a_file_that_says_something_else_is_one_line_that_helps(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file), "--name=x")


def test_secrets_come_from_the_environment_and_are_masked() -> None:
    config = parse("--name", "x", environ={"MOONSERVE_PASSWORD": "hunter2"})
    assert config.password == "hunter2"
    assert effective(config)["password"] == "***"
    assert "hunter2" not in " ".join(to_flags(config))


def test_flags_made_from_a_configuration_build_it_again() -> None:
    config = parse("--name", "x", "--no-enable-cache", "--names", "a,b", "--depth", "3")
    assert parse(*to_flags(config)) == config


def test_help_lists_every_flag() -> None:
    with pytest.raises(HelpRequested, match="--max-model-len"):
        parse("--help")


@pytest.mark.parametrize(("text", "size"), [("17", 17), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("0.5MiB", 2**19)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
