"""Whether a command that nobody runs would still be understood: its verb, module, target, file and flags exist.

Values are not looked at, and programs of others are taken as they are.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from deploy.cli import VERBS
from deploy.reference import PAGES
from protocol.config import options_of

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_SOURCES = ("benchmarks", "conductor", "deploy", "gateway", "kvstore", "models", "tests", "traces")
_ENDS = ";&|\n"
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")


def commands_of(script: str) -> Iterator[list[str]]:
    """The simple commands of a script, as words; comments and assignments are left out."""
    script = re.sub(r"\\\n", " ", script).replace("[", " ").replace("]", " ")
    # A comment would take the end of its line along, which ends a command.
    lexer = shlex.shlex(re.sub(r"(\s)#", r"\1\n#", script), posix=True, punctuation_chars=_ENDS)
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    for token in [*lexer, "\n"]:
        if not set(token) <= set(_ENDS):
            words += [] if not words and _ASSIGNMENT.match(token) else [token]
        elif words:
            yield words
            words = []


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command of ours; None where nothing is, or it is somebody else's."""
    program, *arguments = words
    if program == "moonserve":
        return _complaint_of_verb(arguments)
    if program == "python" and arguments[:1] == ["-m"]:
        return _complaint_of_module(arguments[1:])
    if program == "make":
        return _complaint_of_targets(arguments)
    if program == "pytest":
        return _missing(argument.split("::")[0] for argument in arguments if "/" in argument)
    return _missing([program]) if "/" in program and not program.startswith("/") else None


def _complaint_of_verb(arguments: list[str]) -> str | None:
    if not arguments or arguments[0] in ("VERB", "--help", "--version"):
        return None
    verb, *rest = arguments
    if verb not in VERBS:
        return f"there is no verb {verb!r}"
    return _unknown(_flags(rest), flags_of_verb(verb))


def _complaint_of_module(arguments: list[str]) -> str | None:
    module, *rest = arguments
    if module.split(".")[0] not in _SOURCES:
        return None
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    return _unknown(_flags(rest), all_flags())


def _complaint_of_targets(arguments: list[str]) -> str | None:
    targets = set(re.findall(r"^([.\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    wanted = [argument for argument in arguments if "=" not in argument]
    unknown = [target for target in wanted if target not in targets]
    return f"make has no {', '.join(unknown)}" if unknown else None


def _missing(paths: Iterator[str] | list[str]) -> str | None:
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"there is no {', '.join(missing)}" if missing else None


def _flags(arguments: list[str]) -> list[str]:
    """What stands behind a bare `--` is for somebody else."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return [argument.partition("=")[0] for argument in own if argument.startswith("--")]


def _unknown(flags: list[str], known: frozenset[str]) -> str | None:
    unknown = sorted(set(flags) - known - {"--help", "--config"})
    return f"unknown: {', '.join(unknown)}" if unknown else None


@cache
def flags_of_verb(verb: str) -> frozenset[str]:
    """Of all forms that the verb has; for verbs without options of the configuration, all flags there are."""
    classes = [cls for title, cls in PAGES if title.split()[1] == verb]
    if not classes or verb == "traces":
        return all_flags()
    options = [option for cls in classes for option in options_of(cls)]
    flags = {option.flag for option in options} | {option.negated_flag for option in options}
    return frozenset(flags | {"--role", "--conditional-disaggregation", "--role-switching"})


@cache
def all_flags() -> frozenset[str]:
    """That anything here understands: options of the configuration, and what is given to argparse."""
    options = [option for _, cls in PAGES for option in options_of(cls)]
    flags = {option.flag for option in options} | {option.negated_flag for option in options}
    for package in _SOURCES:
        for path in (ROOT / package).rglob("*.py"):
            flags |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text()))
    return frozenset(flags)
