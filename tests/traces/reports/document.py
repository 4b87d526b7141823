"""A page as a browser's parser sees it, strictly: every tag closed in order, ids unique, references met."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "link", "img", "br", "hr", "input"}


class Document(HTMLParser):
    """Feeds a whole page; raises AssertionError where it is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.outside: list[str] = []  # whatever would be loaded from elsewhere
        self.headings: list[str] = []
        self.words: list[str] = []
        self.num_plots = 0
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        assert len(set(self.ids)) == len(self.ids), "ids are unique"
        assert set(self.references) <= set(self.ids), "references are met"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" in self.open:
            assert "url(" not in data
            assert "@import" not in data
        else:
            self.words.append(data)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = value or ""
            if name == "id":
                self.ids.append(text)
            if name == "class" and text == "plot":
                self.num_plots += 1
            self.references += re.findall(r"url\(#([^)]*)\)", text)
            if name in ("href", "xlink:href", "src"):
                if text.startswith("#"):
                    self.references.append(text[1:])
                elif not text.startswith("data:image/png;base64,"):
                    self.outside.append(text)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())
