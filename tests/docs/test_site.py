"""The site builds without a warning, and nothing on it is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

# What a browser loads by itself; links are the reader's to follow.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(https?:|//)[^>]*"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: pages that nobody links to, dead links and dead anchors are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    names = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert names | {"ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "LOG"} <= {
        path.stem for path in site.glob("*.html")
    }


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        found = [match.group() for match in LOADED.finditer(path.read_text())]
        assert not [tag for tag in found if 'rel="canonical"' not in tag], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text()), path.name
