"""Parses the fenced blocks of the documentation pages. A block's info string defines how it is tested:

    ```console                     commands after `$ `, their output below; the output is compared
    ```bash                        a script
    ```python                      code; the blocks of a page share their namespace
    ```text output                 the output of the block before it
    ```python title="policy.py"    a file of this name in the folder of the page's commands
    ```console cluster             `moonserve serve …`: the cluster that the page uses from here on
    ```bash skip="needs a GPU"     not run, for this reason; its commands are still checked

In output, `…` and `...` match anything. This module runs nothing.
"""

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
    """A fenced block. `line`: its first line, from 1. `words`: the info string's words after the language."""

    line: int
    language: str
    words: dict[str, str]
    text: str

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and "skip" not in self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a console and its output as shown; "" if none is shown."""

    command: str
    shown: str


def fences_of(page: str) -> Iterator[Fence]:
    """Yields a page's fenced blocks in order. Indented blocks are not examples and are left out."""
    for match in _FENCE.finditer(page):
        language, _, rest = match["info"].strip().partition(" ")
        yield Fence(
            line=page.count("\n", 0, match.start()) + 1,
            language=language,
            words={word["name"]: word["value"] or "" for word in _WORD.finditer(rest)},
            text=match["text"],
        )


def without_fences(page: str) -> str:
    """Returns the page's prose."""
    return _FENCE.sub("", page)


def steps_of(console: str) -> Sequence[Step]:
    """Returns a console's commands; a backslash continues one. Raises ValueError for output before any command."""
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
