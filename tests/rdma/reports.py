"""What became of the tests that ran in the guest, from the lines that its conftest wrote."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    nodeid: str
    outcome: str
    """passed, failed, skipped; "started" when the guest ended first."""
    text: str
    duration_s: float

    @property
    def is_good(self) -> bool:
        return self.outcome in ("passed", "skipped")

    def __str__(self) -> str:
        return f"{self.outcome} {self.nodeid} ({self.duration_s:.1f} s)\n{self.text}"


def read(path: Path) -> dict[str, list[Case]]:
    """{file: its cases, each with the last thing said of it}; a failure stays one."""
    last: dict[str, Case] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        case = Case(**json.loads(line))
        if case.nodeid not in last or last[case.nodeid].outcome != "failed":
            last[case.nodeid] = case
    by_file: defaultdict[str, list[Case]] = defaultdict(list)
    for case in last.values():
        by_file[case.nodeid.split("::")[0]].append(case)
    return dict(by_file)
