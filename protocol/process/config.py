"""Configuration from frozen dataclasses whose fields are the flags, environment variables and TOML keys.

The value of a field `max_model_len` comes from `--max-model-len`, then `MOONSERVE_MAX_MODEL_LEN`, then `max_model_len`
(or `max-model-len`) in the TOML file that `--config` names, then its default. A configuration is built once, at the
entry point of a process.
"""

import dataclasses
import difflib
import os
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from moonserve.protocol.errors import ConfigError

T = TypeVar("T")

ENV_PREFIX = "MOONSERVE_"
EXIT_CONFIG = 2  # the user must correct the configuration
EXIT_INTERRUPTED = 130  # as shells report SIGINT
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class HelpRequested(Exception):
    """`--help` was given; the message is the text to print."""


def option(
    default: Any = MISSING,
    *,
    help: str,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    masked: bool = False,
    unit: str = "",
    passed_on: bool = False,
) -> Any:
    """Declares a dataclass field as an option. An option without a default is required.

    A `secret` is read from the environment or the TOML file only, because process lists show flags. A `masked` option
    has a flag, but its value is hidden when the configuration is printed. `unit="bytes"` accepts sizes like `512MiB`
    in addition to plain numbers. A `passed_on` option `engine`, a tuple of strings, collects the options of another
    program: `--engine.NAME VALUE` becomes its item `NAME=VALUE`, and `--engine.NAME` without a value the item `NAME`.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "secret": secret,
        "masked": masked or secret,
        "unit": unit,
        "passed_on": passed_on,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a configuration class and its names for users."""

    name: str
    type: Any  # the bare type, without `| None`
    default: Any  # MISSING when required
    help: str
    choices: tuple[str, ...]
    secret: bool
    masked: bool
    unit: str
    passed_on: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-") + (".NAME" if self.passed_on else "")

    @property
    def negated_flag(self) -> str:
        """Flag that sets a bool option to false: `--no-enable-x` for `enable_x`."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """Default as a user would type it; empty if there is none."""
        if self.default in (MISSING, None, "", ()):
            return ""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        if self.type is bool:
            return "on" if self.default else "off"
        return _size(self.default) if self.unit == "bytes" else str(self.default)


def options_of(cls: type) -> Iterator[Option]:
    """Yields the options of a configuration class."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = _bare_type(hints[field.name])
        yield Option(name=field.name, type=kind, default=field.default, **field.metadata)


def run_command(
    cls: type[T],
    run: Callable[[T], int],
    argv: Sequence[str],
    *,
    prog: str,
    positional: str | None = None,
    interrupted: str | None = None,
) -> int:
    """Runs a command with the configuration from `argv` and the environment, and returns its exit code.

    A ConfigError prints one line on stderr and gives exit code 2. `positional` is the flag that is inserted before a
    first argument that is not a flag. `interrupted` completes the message after Ctrl-C and says what is left behind;
    with None, KeyboardInterrupt is raised.
    """
    arguments = list(argv)
    if positional is not None and arguments and not arguments[0].startswith("-"):
        arguments.insert(0, positional)
    try:
        return run(load_config(cls, arguments, prog=prog, environ=os.environ))
    except HelpRequested as request:
        sys.stdout.write(f"{request}\n")
        return 0
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        sys.stderr.write(f"{prog}: interrupted; {interrupted}\n")
        return EXIT_INTERRUPTED


def load_config(cls: type[T], argv: Sequence[str], *, prog: str, environ: Mapping[str, str]) -> T:
    """Builds `cls` from flags, environment, TOML file and defaults.

    Raises ConfigError with a one-line message that says what to do, or HelpRequested.
    """
    options = {option.name: option for option in options_of(cls)}
    own, passed_on = _take_passed_on(argv, options)
    flags, config_file = _parse_flags(own, options, prog)
    texts: dict[str, Any] = {}
    if config_file is not None:
        texts.update(_read_toml(Path(config_file), options))
    texts.update({name: environ[option.env] for name, option in options.items() if option.env in environ})
    texts.update(flags)
    texts.update(passed_on)
    values = {name: _convert(options[name], value) for name, value in texts.items()}
    missing = [o.flag for o in options.values() if o.default is MISSING and o.name not in values]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given; see {prog} --help")
    return cls(**values)


def masked_values(config: object) -> dict[str, Any]:
    """Returns the configuration as a dict with masked secrets, to be printed at start."""
    values = {option: getattr(config, option.name) for option in options_of(type(config))}
    return {o.name: "***" if o.masked and value else value for o, value in values.items()}


def to_flags(config: object) -> list[str]:
    """Returns flags from which `load_config` builds this configuration again. Secrets are left to the environment."""
    values = {option: getattr(config, option.name) for option in options_of(type(config)) if not option.secret}
    return [flag for option, value in values.items() if value != option.default for flag in flags_of(option, value)]


def flags_of(option: Option, value: Any) -> list[str]:
    """Returns the flags that give the option this value; none for None and for an empty list."""
    if value is None or value in ((), []):
        return []
    if option.passed_on:
        return [option.flag.replace("NAME", item) for item in value]
    if option.type is bool:
        return [option.flag if value is True else option.negated_flag]
    return [option.flag, ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)]


def require_at_least_1(config: object, *names: str) -> None:
    """Raises ConfigError for the first of the named options whose value is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")


def parse_bytes(text: str) -> int:
    """Parses a size such as `4096`, `512MiB` or `4GB` into bytes. Raises ValueError if `text` is not a size."""
    stripped = text.strip()
    digits = stripped.rstrip("BbIiKkMmGgTt ")
    unit = stripped[len(digits) :].strip().upper()
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a size such as 512MiB or 4GB") from None


def _size(num_bytes: int) -> str:
    """Formats a size in the largest binary unit that needs no fraction; the inverse of `parse_bytes`."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _UNITS[unit.upper()] == 0:
            return f"{num_bytes // _UNITS[unit.upper()]}{unit}"
    return str(num_bytes)


def _bare_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _take_passed_on(argv: Sequence[str], options: Mapping[str, Option]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Separates the arguments of `passed_on` options. Returns the other arguments, and the items by option."""
    prefixes = {o.flag.removesuffix("NAME"): o.name for o in options.values() if o.passed_on}
    rest, items = [], dict[str, tuple[str, ...]]()
    remaining = list(reversed(argv))
    while remaining:
        argument = remaining.pop()
        prefix, dot, item = argument.partition(".")
        name = prefixes.get(prefix + dot)
        if name is None or not item:
            rest.append(argument)
            continue
        if "=" not in item and remaining and not remaining[-1].startswith("--"):
            item = f"{item}={remaining.pop()}"
        items[name] = (*items.get(name, ()), item)
    return rest, items


def _parse_flags(
    argv: Sequence[str], options: Mapping[str, Option], prog: str
) -> tuple[dict[str, str | bool], str | None]:
    found: dict[str, str | bool] = {}
    config_file: str | None = None
    by_flag = {o.flag: o for o in options.values() if not o.secret and not o.passed_on}
    negated = {o.negated_flag: o for o in by_flag.values() if o.type is bool}
    remaining = iter(argv)
    for argument in remaining:
        flag, equals, inline = argument.partition("=")
        if flag in ("-h", "--help"):
            raise HelpRequested(_help_text(prog, options.values()))
        if flag == "--config":
            config_file = inline if equals else _next_value(remaining, flag)
        elif flag in negated:
            found[negated[flag].name] = False
        elif flag in by_flag:
            option = by_flag[flag]
            if option.type is bool and not equals:
                found[option.name] = True
            else:
                found[option.name] = inline if equals else _next_value(remaining, flag)
        else:
            raise ConfigError(f"unknown argument {argument!r}{nearest(flag, [*by_flag, *negated])}")
    return found, config_file


def _next_value(remaining: Iterator[str], flag: str) -> str:
    value = next(remaining, None)
    if value is None:
        raise ConfigError(f"{flag} needs a value")
    return value


def _read_toml(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, options)}")
        values[name] = value
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a hint at the known word that a misspelled one may stand for; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _convert(option: Option, value: Any) -> Any:
    try:
        converted = _convert_type(option, value)
    except (ValueError, TypeError, OverflowError) as error:  # TypeError: a TOML value of another type
        raise ConfigError(f"{option.flag}: {value!r} is not valid: {error}") from error
    if option.choices and converted not in option.choices:
        raise ConfigError(f"{option.flag} is one of {', '.join(option.choices)}, not {value!r}")
    return converted


def _convert_type(option: Option, value: Any) -> Any:
    if option.unit == "bytes" and isinstance(value, str):
        return parse_bytes(value)
    if option.type is bool:
        return value if isinstance(value, bool) else _parse_bool(str(value))
    if typing.get_origin(option.type) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(str(part).strip() for part in parts if str(part).strip())
    return option.type(value)


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError("expected true or false")


def _help_text(prog: str, options: Iterable[Option]) -> str:
    lines = [f"usage: {prog} [--config FILE.toml] [options]", ""]
    for option in options:
        names = option.env if option.secret else option.flag
        if option.type is bool and not option.secret:
            names += f", {option.negated_flag}"
        lines.append(f"  {names}")
        lines.append(f"      {option.help}{_default_note(option)}")
    return "\n".join(lines)


def _default_note(option: Option) -> str:
    notes = []
    if option.choices:
        notes.append("one of " + ", ".join(option.choices))
    if option.default is MISSING:
        notes.append("required")
    elif option.shown_default:
        notes.append(f"default {option.shown_default}")
    if option.secret:
        notes.append("environment or TOML only")
    return f" ({'; '.join(notes)})" if notes else ""
