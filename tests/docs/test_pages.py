"""What pages name exists: commands, flags, files, metrics; and no command is shown that nobody looks at."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from deploy.cli import VERBS
from tests.docs.commands import FLAG, all_flags, commands_of, complaint
from tests.docs.fences import RUNNABLE, fences_of, steps_of, without_fences
from tests.docs.pages import IDS, PAGES, ROOT

CODE = re.compile(r"`([^`\n]+)`")
OURS = ("moonserve ", "make ", "python -m ", "pytest ")
COMMAND = re.compile(
    rf"^(\$ )?(moonserve ({'|'.join(VERBS)})\b|make |python -m |pytest )", re.MULTILINE
)
METRIC = re.compile(r"`((?:moonserve_|vllm:|master_)[a-z_]+)")
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"docs", "proto"}
SAMPLE_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")

# Of programs that pages compare with.
FOREIGN = {"--ioengine", "--iodepth", "--numjobs", "--thread", "--direct", "--time"}  # fio
FOREIGN |= {"--resources"}  # ray

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


@every_page
def test_a_block_with_commands_says_that_it_is_one(page: Path) -> None:
    """So that it is run, or says why not."""
    for fence in fences_of(page.read_text()):
        if fence.language not in RUNNABLE:
            assert not COMMAND.search(fence.text), f"{page.name}:{fence.line}: which language?"


@every_page
def test_who_is_not_run_says_why(page: Path) -> None:
    for fence in fences_of(page.read_text()):
        assert fence.words.get("skip", "why"), f"{page.name}:{fence.line}"
        assert set(fence.words) <= {"skip", "cluster", "title", "output"}, fence.words


@every_page
def test_what_commands_name_exists(page: Path) -> None:
    """Verbs, modules, make's targets, files and flags: those of blocks, run or not, and of the prose."""
    text = page.read_text()
    scripts = [fence.text for fence in fences_of(text) if fence.language == "bash"]
    for fence in fences_of(text):
        if fence.language == "console":
            scripts += [step.command for step in steps_of(fence.text)]
    scripts += [code for code in CODE.findall(without_fences(text)) if code.startswith(OURS)]
    for words in (words for script in scripts for words in commands_of(script)):
        assert complaint(words) is None, f"{page.name}: {' '.join(words)}: {complaint(words)}"


@every_page
def test_flags_in_the_prose_exist(page: Path) -> None:
    codes = [code for code in CODE.findall(without_fences(page.read_text())) if code[:2] == "--"]
    for code in codes:
        for flag in FLAG.findall(code):
            assert flag in all_flags() | FOREIGN, f"{page.name}: {code}"


@every_page
def test_files_in_the_prose_exist(page: Path) -> None:
    """Named by their path from the root, or from tests/, with or without `.py`."""
    for code in CODE.findall(without_fences(page.read_text())):
        path = code.partition("::")[0]
        if re.fullmatch(r"[\w.-]+(/[\w.*-]+)+/?", path) and path.split("/")[0] in PACKAGES:
            places = (path.rstrip("/"), f"{path}.py", f"tests/{path}")
            assert any(any(ROOT.glob(place)) for place in places), f"{page.name}: {path}"


@every_page
def test_metrics_in_the_prose_exist(page: Path) -> None:
    """The reference is what processes register (tests/deploy/test_metrics_reference.py); libraries may have others."""
    reference = (ROOT / "docs" / "metrics.md").read_text()
    for name in METRIC.findall(page.read_text()):
        stem = SAMPLE_SUFFIX.sub("", name)
        known = f"`{name}`" in reference or stem in sources() or name in sources()
        assert known, f"{page.name}: {name}"


def test_what_the_runbook_quotes_is_said_somewhere() -> None:
    """Log lines and messages, as far as they are fixed text."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = [code for code in CODE.findall(without_fences(page)) if " " in code]
    quotes = [code for code in quotes if not code.startswith((*OURS, "--"))]
    assert quotes
    for quote in quotes:
        assert quote in sources(), quote


@cache
def sources() -> str:
    """All of the packages' code."""
    packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    return "\n".join(path.read_text() for folder in packages for path in folder.rglob("*.py"))


def test_commands_are_told_apart() -> None:
    script = "A=1 make x && moonserve serve \\\n  --port 1 # all\ncurl -d 'a; b' | cat\n# no\n"
    assert list(commands_of(script)) == [
        ["make", "x"],
        ["moonserve", "serve", "--port", "1"],
        ["curl", "-d", "a; b"],
        ["cat"],
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("moonserve serve --prefill-workers 2", None),
        ("moonserve serve --prefil-workers 2", "--prefil-workers"),
        ("moonserve observe", "observe"),
        ("python -m benchmarks.nothing", "benchmarks.nothing"),
        ("make cake", "cake"),
        ("pytest tests/nothing.py", "tests/nothing.py"),
        ("curl --no-such-flag", None),
    ],
)
def test_a_command_that_would_not_be_understood_is_told(command: str, expected: str | None) -> None:
    found = complaint(command.split())
    assert found is None if expected is None else expected in (found or "")
