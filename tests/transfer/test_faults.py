"""Every fault that the transfer engine must survive ends as the table says, within its deadline.

python -m tests.transfer.test_faults            the table in Markdown, for the documentation
"""

from __future__ import annotations

import sys

import pytest

from tests.transfer import fault_links, fault_strangers  # noqa: F401 - they add theirs to FAULTS
from tests.transfer.stage import FAULTS, Fault, Stage


def play(each: Fault, transport: str) -> tuple[str, float]:
    """The outcome in words, and the seconds that the slowest batch took."""
    with Stage(transport, each.deadline_s) as stage:
        outcome = each.play(stage)
        return outcome, stage.took_s


CASES = [
    pytest.param(each, transport, id=f"{each.name}, {transport}")
    for each in FAULTS
    for transport in each.transports
]


@pytest.mark.parametrize(("each", "transport"), CASES)
def test_a_fault_has_the_outcome_that_the_table_tells(each: Fault, transport: str) -> None:
    play(each, transport)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    _say("| fault | transport | deadline | outcome | seconds |")
    _say("|---|---|---|---|---|")
    for each in FAULTS:
        for transport in each.transports:
            outcome, took_s = play(each, transport)
            _say(
                f"| {each.name} | {transport} | {each.deadline_s:g} s | {outcome} | {took_s:.3f} |"
            )


if __name__ == "__main__":
    main()
