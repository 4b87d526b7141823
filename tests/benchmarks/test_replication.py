"""The table of replication: rows with and without it, of the same arrivals, over a given trace and written ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replication import POLICIES, SETTINGS, Setting, as_table, figures, main, row_of
from traces.format import TraceRecord
from traces.simulator.spec import ClusterSpec


def records(count: int) -> list[TraceRecord]:
    """One long prompt, again and again with another end, much faster than its holder computes the ends."""
    return [
        TraceRecord(
            arrived_s=10.0 * (number > 0) + number / 20,
            input_length=20_480 + 4_096,
            output_length=4,
            hash_ids=(*range(40), *range(100 * number + 100, 100 * number + 108)),
        )
        for number in range(count)
    ]


def test_a_row_says_what_was_copied_and_nothing_of_it_where_nothing_could_be() -> None:
    setting = Setting(name="by hand")
    runs = [run for run in setting.runs() if run.spec.policy == "local-cache-aware"]  # type: ignore[union-attr]
    rows = [row_of(setting, run, figures(run.do(records(60)))) for run in runs]
    without, beside = rows
    assert (without["replication"], without["copies"]) == (False, 0)
    assert beside["replication"]
    assert beside["replicas_made"] > 0
    assert beside["bytes_copied"] > 0
    lines = as_table(rows).splitlines()
    assert lines[2].startswith("| by hand | local-cache-aware | off |")
    assert lines[2].endswith("| – | – | – | – | – |")
    assert lines[3].startswith("| by hand | local-cache-aware | on |")


def test_every_row_has_its_counterpart() -> None:
    """Of each setting and policy one without and one with it."""
    for setting in SETTINGS:
        specs = [run.spec for run in setting.runs()]
        assert all(isinstance(spec, ClusterSpec) for spec in specs)
        keys = [(spec.policy, spec.replication is not None) for spec in specs]  # type: ignore[union-attr]
        assert sorted(keys) == sorted((p, is_on) for p in POLICIES for is_on in (False, True))


def test_chosen_settings_are_simulated_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out/found.json"
    arguments = ["--trace", "unread.jsonl", "--limit", "5", "--only", "agents"]
    assert main([*arguments, "--output", str(output)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| agents")]
    assert len(rows) == 2 * len(POLICIES)
    assert output.is_file()
