"""The pages that are held to what they show, their fenced blocks, and what the info strings of these ask for.

    ```console                     commands behind `$ `, what they print below; both are compared
    ```bash                        a script
    ```python                      code; blocks of one page share their names
    ```text output                 what the block before it prints
    ```python title="policy.py"    a file of this name beside the page's commands
    ```console cluster             `moonserve serve …`: the cluster that the page talks to from here on
    ```bash skip="needs a GPU"     not run, and why; it is checked all the same (`commands`)

In what is printed `…` and `...` stand for anything. Knows nothing of running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))]
)
RUNNABLE = ("console", "bash", "python")
_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=ticks)[ ]*$", re.M | re.S)
_WORD = re.compile(r'(?P<name>[a-z]+)(="(?P<value>[^"]*)")?')


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """`line`: of its opening, from 1. `words`: of the info string behind the language."""

    line: int
    language: str
    words: dict[str, str]
    text: str

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and "skip" not in self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a console, and what it prints; "" where nothing is shown."""

    command: str
    shown: str


def fences_of(page: str) -> Iterator[Fence]:
    """In the order of the page; indented ones are no examples."""
    for match in _FENCE.finditer(page):
        language, _, rest = match["info"].strip().partition(" ")
        yield Fence(
            line=page.count("\n", 0, match.start()) + 1,
            language=language,
            words={word["name"]: word["value"] or "" for word in _WORD.finditer(rest)},
            text=match["text"],
        )


def without_fences(page: str) -> str:
    """The prose."""
    return _FENCE.sub("", page)


def steps_of(console: str) -> Sequence[Step]:
    """A command goes on in the next line behind a backslash. Raises ValueError for output before any command."""
    steps: list[Step] = []
    goes_on = False
    for line in console.splitlines():
        if line.startswith("$ "):
            steps.append(Step(command=line[2:], shown=""))
        elif not steps:
            raise ValueError(f"a console begins with `$ `, not {line!r}")
        elif goes_on:
            steps[-1] = Step(command=f"{steps[-1].command}\n{line}", shown="")
        else:
            steps[-1] = Step(command=steps[-1].command, shown=f"{steps[-1].shown}{line}\n")
        goes_on = not steps[-1].shown and line.endswith("\\")
    return steps
