"""The page: well-formed, complete in itself, the same for the same results, without what the data lacks."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.traces.reports.document import Document
from tests.traces.reports.made_up import made_up, outcome, rejected, result
from traces.reports import read_results, write_page
from traces.reports.page import page
from traces.simulator.results import InstanceSample

ODD = "a <b> & \"c\" 'd' $x^2$ _e </svg><script>"


def small(name: str, **given: object) -> Document:
    return Document(page([made_up(name, num_requests=40, **given)]))  # type: ignore[arg-type]


def test_the_page_is_well_formed_and_loads_nothing_from_elsewhere() -> None:
    document = Document(
        page([made_up("one", num_requests=80), made_up(ODD, slowness=3, num_requests=80)])
    )
    assert document.outside == []
    assert document.num_plots == 2 + 1 + 1 + 2 + 2 + 2  # only the slow one rejects


def test_every_name_is_on_the_page_escaped() -> None:
    """In tables, legends and captions, whatever signs names and reasons are made of."""
    text = page([made_up("plain", num_requests=9), result(ODD, outcome(0), rejected(1, "<i>&"))])
    document = Document(text)
    assert ODD in document.text
    assert "plain" in document.text
    assert "rejected: <i>&" in document.text
    assert ODD not in text
    assert "<script" not in text
    assert "<i>" not in text


def test_names_of_instances_are_escaped_as_well() -> None:
    sample = InstanceSample(
        at_s=1.0, instance_id="<p>$&", queued=1, running=1, context_tokens=0, predicted_queue_s=0.0
    )
    text = page([result("r", outcome(0), instances=(sample,))])
    assert "<p>$&" in Document(text).text
    assert "<p>$" not in text


def test_equal_results_give_equal_pages_whatever_was_drawn_before() -> None:
    first = page([made_up("a", num_requests=50, slowness=2)])
    page([made_up("b", num_requests=20)])
    assert page([made_up("a", num_requests=50, slowness=2)]) == first


def test_what_simulating_took_is_not_on_the_page() -> None:
    fast = result("r", outcome(0), wall_s=1.0)
    assert page([fast]) == page([replace(fast, wall_s=99.0)])


def test_the_page_can_be_drawn_again_from_the_json_beside_it(tmp_path: Path) -> None:
    results = [
        made_up("x", num_requests=60, slowness=2, capacity_tokens=10**6, series="s"),
        made_up("y", num_requests=60, rate=9.0, capacity_tokens=10**7, series="s"),
    ]
    path = write_page(results, tmp_path / "new" / "out")
    assert path == tmp_path / "new" / "out" / "index.html"
    again = write_page(read_results(path.parent / "results.json"), tmp_path / "again")
    assert again.read_bytes() == path.read_bytes()
    for name in ("index.html", "results.json"):
        assert (tmp_path / "again" / name).read_bytes() == (path.parent / name).read_bytes()


def test_what_the_data_lacks_is_left_out() -> None:
    bare = Document(page([result("bare", outcome(0, predicted_ttft_s=0.0))]))
    assert bare.headings == ["Latencies", "What first tokens waited for"]
    nothing = Document(page([result("nothing", duration_s=0.0)]))
    assert nothing.headings == ["What first tokens waited for"]
    assert nothing.num_plots == 0
    full = small("full", slowness=3)
    assert full.headings == [
        "Latencies", "Rejections and failures", "Predicted against actual TTFT",
        "Replicas of popular blocks", "Load of each instance", "What first tokens waited for",
        "Counters",
    ]  # fmt: skip


def test_rates_and_capacities_are_drawn_against_only_where_they_differ() -> None:
    def headings(*results: object) -> list[str]:
        return Document(page(list(results))).headings  # type: ignore[arg-type]

    steady = [outcome(index) for index in range(4)]
    hasty = [outcome(index, arrived_s=index / 2) for index in range(4)]
    one, same = result("1", *steady, capacity_tokens=5), result("2", *steady, capacity_tokens=5)
    assert headings(one, same) == ["Latencies", *headings(one)[1:]]
    assert "Goodput against rate" in headings(one, result("3", *hasty))
    assert "Hit rate against capacity" in headings(one, result("4", *steady, capacity_tokens=6))
    assert "Hit rate against capacity" not in headings(one, result("5", *steady))


def test_latencies_of_zero_are_drawn_on_the_left_edge() -> None:
    zero = outcome(0, ttft_s=0.0, tbt_s=0.0)
    assert Document(page([result("z", zero, outcome(1))])).num_plots == 3
    assert "Latencies" not in Document(page([result("only", zero)])).headings


def test_colours_are_the_pages_own_so_that_dark_and_light_are_readable() -> None:
    text = page([made_up("a", num_requests=30, slowness=2), made_up("b", num_requests=30)])
    body = text[text.index("</style>") :]
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", body)) == set()
    used = set(re.findall(r"var\(--(\w+)\)", body))
    assert {"ink", "muted", "grid", "hue0", "hue1"} <= used
    assert all(f"--{name}:" in text for name in used)


def test_without_matplotlib_there_are_tables_json_and_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = write_page([made_up("m", num_requests=20)], tmp_path)
    document = Document(path.read_text(encoding="utf-8"))
    assert document.num_plots == 0
    assert document.headings == ["What first tokens waited for", "Counters"]
    for text in (document.text, capsys.readouterr().err):
        assert "need matplotlib, pip install 'moonserve[plots]'" in text
    assert read_results(tmp_path / "results.json")[0].name == "m"


def test_what_cannot_be_written_is_a_complaint_about_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results"):
        write_page([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_page([result("r", outcome(0))], tmp_path / "file")
