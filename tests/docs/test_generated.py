"""Tests that generated pages and pictures are up to date, and that the site builds without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

from docs.diagrams.sequence import draw, read
from docs.hooks.site import as_on_site
from docs.reference import configuration, metrics
from tests.docs.fences import ROOT

DOCS = ROOT / "docs"
# Resources that a browser loads by itself; links are not loaded until the reader follows them.
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(https?:|//)[^>]*")


async def test_the_checked_in_pages_and_pictures_are_fresh() -> None:
    """Checked-in pages and pictures equal their generators' output; `make docs` rewrites them."""
    assert (DOCS / "configuration.md").read_text() == configuration.render()
    assert (DOCS / "metrics.md").read_text() == await metrics.render()
    for text in (DOCS / "diagrams").glob("*.txt"):
        picture = DOCS / "images" / f"{text.stem}.svg"
        assert picture.read_text() == draw(*read(text.read_text()))


def test_each_metric_has_a_meaning_and_only_one_kind() -> None:
    lines = (DOCS / "metrics.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert len(rows) > 100
    kinds: dict[str, str] = {}
    for name, kind, _, text in rows:
        assert text.strip(" |"), name
        assert kinds.setdefault(name, kind) == kind


def test_the_site_has_every_page_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """The strict build succeeds: pages without links to them, dead links and dead anchors are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert built.returncode == 0, built.stderr
    names = {path.stem for path in DOCS.glob("*.md")}
    names |= {"ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "LOG"}
    assert names <= {path.stem for path in tmp_path.glob("*.html")}
    for path in tmp_path.rglob("*.html"):
        found = [match.group() for match in LOADED.finditer(path.read_text())]
        assert not [tag for tag in found if 'rel="canonical"' not in tag], path.name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text()), path.name


def test_the_site_shows_a_block_without_what_is_for_tests() -> None:
    shown = as_on_site('```bash skip="needs a GPU"\nmake test\n```\n', at_root=False)
    assert "```bash\nmake test" in shown
