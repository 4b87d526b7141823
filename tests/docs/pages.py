"""The pages that are held to what they show: all of docs/, and the repository's own."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    ]
)
IDS = [page.stem for page in PAGES]
