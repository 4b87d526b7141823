"""What counts as hidden, and what the picture shows."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.engine.overlap_record import Record
from benchmarks.engine.overlap_timeline import picture

RECORD = Record(
    leases=[(0.0, 0.1)],
    turns=[(0.1, 0.4), (0.4, 0.9)],
    checks=[(0.9, 1.0)],
    steps=[(0.4, 2.0)],
    pauses=[(0.5, 0.8), (1.5, 1.6)],
)


def test_waits_for_layers_hide_nothing() -> None:
    """The engine computes from 0.4 to 0.5 and from 0.8 on; the load takes 1 s."""
    assert RECORD.load_s == pytest.approx(1.0)
    assert RECORD.hidden_share == pytest.approx(0.3)
    assert RECORD.compute_s == pytest.approx(1.2)


def test_nothing_is_hidden_where_nothing_is_loaded_or_computing_begins_behind() -> None:
    assert Record(steps=[(0.0, 1.0)]).hidden_share == 0.0
    assert Record(turns=[(0.0, 1.0)], steps=[(1.0, 2.0)]).hidden_share == 0.0


def test_a_record_counts_from_the_arrival_of_its_prompt() -> None:
    assert RECORD.since(0.4).steps == [pytest.approx((0.0, 1.6))]
    assert RECORD.since(0.4).hidden_share == pytest.approx(RECORD.hidden_share)


def test_the_picture_has_a_bar_for_each_turn_and_each_layer(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    picture(path, "one & two", [("layered", RECORD)])
    root = ET.fromstring(path.read_text())
    bars = [each.get("fill") for each in root.iter() if each.tag.endswith("rect")]
    legend = 1
    assert bars.count("#3a86ff") == 2 + legend
    assert bars.count("#2a9d8f") == 3 + legend
