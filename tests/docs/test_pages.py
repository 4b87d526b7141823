"""Tests that commands, flags, files and metrics named by pages exist, and that every shown command is checked."""

import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.reference.configuration import PAGES as OPTIONS
from moonserve.__main__ import VERBS
from moonserve.protocol.process.config import options_of
from tests.docs.fences import PAGES, ROOT, RUNNABLE, fences_of, steps_of, without_fences
from tests.test_layering import SHIPPED

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_SOURCES = ("benchmarks", "docs", "tests", "moonserve", *SHIPPED)
_ENDS = ";&|\n"
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")
CODE = re.compile(r"`([^`\n]+)`")
OURS = ("moonserve ", "make ", "python -m ", "pytest ")
COMMAND = re.compile(rf"^(\$ )?(moonserve ({'|'.join(VERBS)})\b|make |python -m |pytest )", re.MULTILINE)
METRIC = re.compile(r"`((?:moonserve_|vllm:|master_)[a-z_]+)")
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"benchmarks", "docs", "proto"}
SAMPLE_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")

# Flags of other programs that pages mention.
FOREIGN = {"--ioengine", "--iodepth", "--numjobs", "--thread", "--direct", "--time"}  # fio
FOREIGN |= {"--resources"}  # ray
FOREIGN |= {"--vllm"}  # of --vllm.NAME


@pytest.mark.parametrize(
    ("command", "is_right"),
    [
        ("python -m moonserve serve --port 1", True),
        ("python -m moonserve serve --no-such-flag", False),
        ("python -m moonserve no-such-verb", False),
        ("python -m moonserve.gateway.server --port 1", True),
        ("python -m moonserve.models", False),
        ("python -m moonserve.no.such", False),
        ("python -m gateway.server", False),
        ("python -m json.tool --any", True),
    ],
)
def test_a_module_that_a_command_runs_is_checked_like_a_verb(command: str, is_right: bool) -> None:
    found = complaint(command.split())
    assert (found is None) == is_right, found


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_everything_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    complaints = [*_of_fences(text), *_of_commands(text), *_of_prose(without_fences(text))]
    assert complaints == []


def _of_fences(text: str) -> Iterator[str]:
    """Yields complaints about blocks: one with commands needs a runnable language, and a skip needs a reason."""
    for fence in fences_of(text):
        if fence.language not in RUNNABLE and COMMAND.search(fence.text):
            yield f"line {fence.line}: which language?"
        if not fence.words.get("skip", "why"):
            yield f"line {fence.line}: why is it skipped?"
        if unknown := set(fence.words) - {"skip", "cluster", "title", "output"}:
            yield f"line {fence.line}: {unknown}"


def _of_commands(text: str) -> Iterator[str]:
    """Yields complaints about the commands of all blocks, run or not, and of the prose."""
    scripts = [fence.text for fence in fences_of(text) if fence.language == "bash"]
    for fence in fences_of(text):
        if fence.language == "console":
            scripts += [step.command for step in steps_of(fence.text)]
    scripts += [code for code in CODE.findall(without_fences(text)) if code.startswith(OURS)]
    for words in (words for script in scripts for words in commands_of(script)):
        if wrong := complaint(words):
            yield f"{' '.join(words)}: {wrong}"


def _of_prose(prose: str) -> Iterator[str]:
    """Yields unknown flags, metrics and files; a path is relative to the root or tests/, with or without `.py`."""
    for code in CODE.findall(prose):
        if code.startswith("--"):
            yield from (f"no flag {flag}" for flag in set(FLAG.findall(code)) - all_flags() - FOREIGN)
        path = code.partition("::")[0]
        if re.fullmatch(r"[\w.-]+(/[\w.*-]+)+/?", path) and path.split("/")[0] in PACKAGES:
            places = (path.rstrip("/"), f"{path}.py", f"tests/{path}")
            if not any(any(ROOT.glob(place)) for place in places):
                yield f"no file {path}"
    for name in METRIC.findall(prose):
        told = f"`{name}`" in (ROOT / "docs" / "metrics.md").read_text()
        if not told and SAMPLE_SUFFIX.sub("", name) not in sources() and name not in sources():
            yield f"no metric {name}"


def test_messages_quoted_by_the_runbook_exist() -> None:
    """Each quoted log line or message, as far as it is fixed text, occurs in the sources."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = [code for code in CODE.findall(without_fences(page)) if " " in code]
    quotes = [code for code in quotes if not code.startswith((*OURS, "--"))]
    assert quotes
    for quote in quotes:
        assert quote in sources(), quote


@cache
def sources() -> str:
    """Returns the source text of all packages except tests."""
    packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    return "\n".join(path.read_text() for folder in packages for path in folder.rglob("*.py"))


def commands_of(script: str) -> Iterator[list[str]]:
    """Yields the words of each simple command in a script, without comments and assignments."""
    script = re.sub(r"\\\n", " ", script).replace("[", " ").replace("]", " ")
    # shlex drops a comment with its newline, which ends a command, so a newline is inserted before it.
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
    """Returns the error in one of our commands; None if it is correct or another program's."""
    match words:
        case ["moonserve"] | ["moonserve", "VERB" | "--help" | "--version", *_]:
            return None
        case ["moonserve", verb, *rest]:
            return _unknown(rest, flags_of_verb(verb)) if verb in VERBS else f"there is no verb {verb!r}"
        case ["python", "-m", "moonserve", *rest]:
            return complaint(["moonserve", *rest])
        case ["python", "-m", module, *rest] if module.split(".")[0] in _SOURCES:
            return _unknown(rest, all_flags()) if can_run(module) else f"there is no module {module} to run"
        case ["make", *arguments]:
            targets = {*re.findall(r"^([.\w-]+):", (ROOT / "Makefile").read_text(), re.M)}
            unknown = [argument for argument in arguments if "=" not in argument and argument not in targets]
            return f"make has no {', '.join(unknown)}" if unknown else None
        case ["pytest", *arguments]:
            return _missing(argument.split("::")[0] for argument in arguments if "/" in argument)
        case [program, *_] if "/" in program and not program.startswith("/"):
            return _missing([program])
    return None


def can_run(module: str) -> bool:
    """Returns True if `python -m` finds the module by the name that it has when installed, or the package's main."""
    if module.split(".")[0] in SHIPPED:
        return False
    try:
        spec = importlib.util.find_spec(module)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return (importlib.util.find_spec(f"{module}.__main__") if is_package else spec) is not None
    except ModuleNotFoundError:  # a package of the path is missing
        return False


def _missing(paths: Iterable[str]) -> str | None:
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"there is no {', '.join(missing)}" if missing else None


def _unknown(arguments: list[str], known: frozenset[str]) -> str | None:
    """Returns a complaint about unknown flags; arguments after a bare `--` are another program's."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flags = {argument.partition("=")[0] for argument in own if argument.startswith("--")}
    flags = {re.sub(r"^(--vllm\.)[a-z-]+$", r"\1NAME", flag) for flag in flags}
    unknown = sorted(flags - known - {"--help", "--config"})
    return f"unknown: {', '.join(unknown)}" if unknown else None


@cache
def flags_of_verb(verb: str) -> frozenset[str]:
    """Returns the flags of all forms of a verb; for verbs without configuration options, all known flags."""
    classes = [cls for title, cls in OPTIONS if title.split()[1] == verb]
    if not classes or verb == "traces":
        return all_flags()
    options = [option for cls in classes for option in options_of(cls)]
    flags = {option.flag for option in options} | {option.negated_flag for option in options}
    return frozenset(flags | {"--role", "--engine", "--conditional-disaggregation", "--role-switching"})


@cache
def all_flags() -> frozenset[str]:
    """Returns all known flags: configuration options, and flags in the source text, such as argparse's."""
    options = [option for _, cls in OPTIONS for option in options_of(cls)]
    flags = {option.flag for option in options} | {option.negated_flag for option in options}
    for package in _SOURCES:
        for path in (ROOT / package).rglob("*.py"):
            flags |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text()))
    return frozenset(flags)
