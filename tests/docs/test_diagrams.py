"""Pictures that are drawn from text are those of the text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.diagrams.sequence import draw, read
from tests.docs.pages import ROOT

TEXTS = sorted((ROOT / "docs" / "diagrams").glob("*.txt"))


@pytest.mark.parametrize("text", TEXTS, ids=[text.stem for text in TEXTS])
def test_the_checked_in_picture_is_fresh(text: Path) -> None:
    """`make docs` draws it."""
    picture = ROOT / "docs" / "images" / f"{text.stem}.svg"
    assert picture.read_text() == draw(*read(text.read_text()))


def test_every_step_is_drawn_with_its_text_escaped() -> None:
    picture = draw(*read("actors a | b\na > b: x < y\nb = a: KV\nb: rests"))
    texts = [
        node.text for node in ElementTree.fromstring(picture).iter() if node.tag[-4:] == "text"
    ]
    assert texts == ["a", "b", "1", "x < y", "2", "KV", "3", "rests"]


@pytest.mark.parametrize("line", ["a > nobody: x", "nothing at all"])
def test_what_is_no_step_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"nobody|no step"):
        read(f"actors a | b\n{line}")
