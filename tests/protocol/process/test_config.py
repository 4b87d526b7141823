"""Tests of configuration: flags, environment and file, messages about errors, secrets, sizes."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import HelpRequested, load_config, masked_values, option, parse_bytes, to_flags


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
    return load_config(Example, argv, prog="example", environ=environ or {})


def test_every_type_of_value_is_read_from_flags() -> None:
    config = parse(
        "--name=x", "--max-model-len", "77", "--no-enable-cache", "--names", "p, q",
        "--dram", "2KiB", "--mode", "b", "--depth", "2",
    )  # fmt: skip
    assert config == Example(
        name="x", max_model_len=77, enable_cache=False, names=("p", "q"), dram=2048, mode="b",
        depth=2.0,
    )  # fmt: skip


def test_flag_overrides_environment_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\nmode = "b"\nmax-model-len = 5\n')
    environ = {"MOONSERVE_NAME": "env", "MOONSERVE_MODE": "a"}
    config = parse("--config", str(file), "--name", "flag", environ=environ)
    assert (config.name, config.mode, config.max_model_len) == ("flag", "a", 5)


@pytest.mark.parametrize(
    ("argv", "content", "message"),
    [
        (["--nam", "x"], b"", "did you mean --name"),
        (["--name", "x", "--mode", "c"], b"", "one of a, b"),
        (["--name", "x", "--max-model-len", "many"], b"", "--max-model-len"),
        (["--name"], b"", "needs a value"),
        ([], b"", "--name must be given"),
        (["--name", "x", "--password", "p"], b"", "unknown argument"),
        (["--name", "x", "--dram", "1ZiB"], b"", "--dram"),
        (["--config", "/nonexistent.toml"], b"", "cannot read"),
        (["--name=x"], b"nane = 'x'\n", "did you mean name"),
        (["--name=x"], b"max-model-len = [1]\n", "--max-model-len"),
        (["--name=x"], b"max-model-len = inf\n", "--max-model-len"),
        (["--name=x"], b"names = 5\n", "--names"),
        (["--name=x"], b"name = '\xff'\n", "not valid TOML"),
    ],
)
def test_bad_flags_or_a_bad_file_give_a_helpful_error(
    tmp_path: Path, argv: list[str], content: bytes, message: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file), *argv)


def test_secrets_are_read_from_environment_and_masked() -> None:
    config = parse("--name", "x", environ={"MOONSERVE_PASSWORD": "hunter2"})
    assert config.password == "hunter2"
    assert masked_values(config)["password"] == "***"
    assert "hunter2" not in " ".join(to_flags(config))


def test_to_flags_rebuilds_the_configuration() -> None:
    config = parse("--name", "x", "--no-enable-cache", "--names", "a,b", "--depth", "3")
    assert parse(*to_flags(config)) == config


def test_help_lists_every_flag() -> None:
    with pytest.raises(HelpRequested, match="--max-model-len"):
        parse("--help")


@pytest.mark.parametrize(("text", "size"), [("17", 17), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("0.5MiB", 2**19)])
def test_sizes_are_parsed_with_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
