"""The configuration reference in the repository says what the code does."""

from __future__ import annotations

from pathlib import Path

from deploy.reference import render

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_checked_in_reference_is_fresh() -> None:
    """`make docs` writes it."""
    assert PAGE.read_text() == render()
