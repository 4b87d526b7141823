"""Commands that run in the test's own process: their exit code and what they printed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Said:
    """The output and the exit code of one command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


class Command:
    """Runs `main` with arguments that begin with `begin`, and with an environment if it takes one."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        main: Callable[..., int],
        *begin: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._capsys = capsys
        self._main = main
        self._begin = begin
        self._environ = environ

    def __call__(self, *arguments: str, ends: int | None = None, environ: Mapping[str, str] | None = None) -> Said:
        """Runs the command. `ends`: the expected exit code; None accepts any."""
        environ = self._environ if environ is None else environ
        self._capsys.readouterr()
        code = self._main([*self._begin, *arguments], *(() if environ is None else (environ,)))
        printed = self._capsys.readouterr()
        assert ends in (None, code), printed.err
        return Said(code, printed.out, printed.err)

    def json(self, *arguments: str) -> list[dict[str, Any]]:
        """Returns the records that a command prints with --json; the command must succeed."""
        return self("--json", *arguments, ends=0).records
