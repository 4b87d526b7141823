"""Strict parser for report pages: tags must close in order, ids must be unique, and references must resolve."""

import base64
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

_VOID = {"meta", "link", "img", "br", "hr", "input"}
_INLINE = "data:image/svg+xml;base64,"


class Document(HTMLParser):
    """Parses a whole page. Raises AssertionError if it is not well-formed or refers to an external resource."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.drawings: list[str] = []  # the text of each image
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        assert len(set(self.ids)) == len(self.ids), "ids are unique"
        assert set(self.references) <= set(self.ids), "references are met"
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.append(given["id"])
        if "href" in given:
            assert given["href"].startswith("#")
            self.references.append(given["href"][1:])
        if "src" in given:
            assert given["src"].startswith(_INLINE)
            drawing = ET.fromstring(base64.b64decode(given["src"].removeprefix(_INLINE)))
            self.drawings.append(" ".join(" ".join(drawing.itertext()).split()))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.words.append(data)
