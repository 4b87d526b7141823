"""Numbers and tables as people read them."""

from __future__ import annotations

import io

import pytest

from deploy.terminal.amounts import size
from deploy.terminal.output import Output, Table, bar, count


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**54, "16384.0 TiB"),
    ],
)
def test_sizes_are_shown_in_the_unit_that_fits(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown


def test_a_bar_shows_whatever_is_above_nothing() -> None:
    assert bar(0.0) == "░" * 10
    assert bar(0.001) == "█" + "░" * 9
    assert bar(1.5) == "█" * 10


def test_counts_are_words() -> None:
    assert (count(1, "object"), count(2_000, "object")) == ("1 object", "2,000 objects")


def test_a_table_that_is_printed_in_portions_has_one_header_and_never_loses_text() -> None:
    stdout = io.StringIO()
    table = Table(Output("kvctl", stdout=stdout), "name", ">bytes")
    table.add("a", "1")
    table.flush()
    table.add("much longer", "1,000")
    table.flush()
    assert stdout.getvalue().splitlines() == ["name  bytes", "a         1", "much longer  1,000"]
