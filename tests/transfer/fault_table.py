"""Every fault that the transfer engine must survive: played by `test_faults`, printed by `__main__`.

python -m tests.transfer.fault_table            the table in Markdown, for the documentation
"""

from __future__ import annotations

import sys

from tests.transfer import fault_links, fault_strangers  # noqa: F401 - they add theirs to FAULTS
from tests.transfer.stage import FAULTS, Fault, Stage


def play(each: Fault, transport: str) -> tuple[str, float]:
    """The outcome in words, and the seconds that the slowest batch took."""
    with Stage(transport, each.deadline_s) as stage:
        outcome = each.play(stage)
        return outcome, stage.took_s


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
