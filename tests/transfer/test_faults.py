"""The fault table, played: each fault ends as the table says, within its deadline."""

from __future__ import annotations

import pytest

from tests.transfer.fault_table import FAULTS, Fault, play

CASES = [
    pytest.param(each, transport, id=f"{each.name}, {transport}")
    for each in FAULTS
    for transport in each.transports
]


@pytest.mark.parametrize(("each", "transport"), CASES)
def test_a_fault_has_the_outcome_that_the_table_tells(each: Fault, transport: str) -> None:
    play(each, transport)
