"""What a run came to, as JSON and as a page for people."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from tests.chaos.clients import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Of one run."""

    seed: int
    minutes: float
    trace: str
    cluster: str
    faults: Counter[str]
    faults_skipped: int
    tally: Tally
    left: list[str] = field(default_factory=list)  # what must not be there at the end

    @property
    def is_good(self) -> bool:
        """Nothing lost, nothing wrong, nothing left, and something was done."""
        tally = self.tally
        is_served = tally.kept + tally.retried > 0 and sum(self.faults.values()) > 0
        return is_served and not (tally.lost or tally.wrong or self.left)

    def as_json(self) -> str:
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        found["tally"] = {each.name: getattr(self.tally, each.name) for each in fields(self.tally)}
        return json.dumps({**found, "is_good": self.is_good}, indent=2, sort_keys=True)

    def as_markdown(self) -> str:
        tally = self.tally
        num_requests = tally.kept + tally.retried + tally.lost + tally.wrong
        faults = "\n".join(f"| {name} | {count} |" for name, count in sorted(self.faults.items()))
        refusals = "\n".join(
            f"| {how} | {count} |" for how, count in sorted(tally.refusals.items())
        )
        return f"""\
{self.minutes:g} minutes, seed {self.seed}, trace {self.trace}, {self.cluster}.

| requests | |
|---|---:|
| asked | {num_requests} |
| kept at the first attempt | {tally.kept} |
| kept after the client asked again | {tally.retried} |
| lost | {tally.lost} |
| wrong | {tally.wrong} |
| tokens compared | {tally.num_tokens} |
| longest gap in a stream that went well | {tally.longest_gap_s:.1f} s |

| refused, then asked again | |
|---|---:|
{refusals or "| none | 0 |"}

| fault | times |
|---|---:|
{faults}
| not done: the victim was down already | {self.faults_skipped} |

Left at the end (blocks, leases, processes, shared memory): {", ".join(self.left) or "nothing"}.
"""
