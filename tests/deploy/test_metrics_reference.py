"""The metrics reference in the repository says what the code registers."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from deploy.metrics_reference import Described, described, render

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


async def test_the_checked_in_reference_is_fresh() -> None:
    """`make docs` writes it."""
    assert PAGE.read_text() == await render()


async def test_each_metric_has_a_meaning_and_only_one_kind() -> None:
    rows = [line.split(" | ") for line in (await render()).splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    kinds: dict[str, str] = {}
    for name, kind, _, text in rows:
        assert text.strip(" |"), name
        assert kinds.setdefault(name, kind) == kind


def test_labels_are_told_where_nothing_was_counted_yet() -> None:
    counter = Counter("drops", "What fell.", ("reason",), registry=CollectorRegistry())
    assert described([counter]) == [Described("drops_total", "counter", ("reason",), "What fell.")]
