"""The verbs of `moonserve traces`."""

from __future__ import annotations

import pytest

from traces.cli import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"usage: moonserve traces {verb}" in capsys.readouterr().out


def test_an_unknown_verb_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse"]) == 2
    assert "did you mean analyze?" in capsys.readouterr().err
