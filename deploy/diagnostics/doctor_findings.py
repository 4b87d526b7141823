"""Findings of `moonserve doctor`, as text for people and as JSON for programs.

`fail`: a requested item does not work, or a requirement of every cluster is not met. `warn`: the item works and could
be better. Each finding in one of these states has a remedy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any


class Severity(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy`: what the operator can do; empty if the state is OK."""

    section: str
    subject: str
    text: str
    remedy: str = ""
    fails: bool = False

    def __post_init__(self) -> None:
        assert self.remedy or not self.fails, f"{self.subject}: what can be done about it?"

    @property
    def state(self) -> Severity:
        if self.fails:
            return Severity.FAIL
        return Severity.WARN if self.remedy else Severity.OK


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.fails for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the findings by section, in order, and whether none of them failed."""
    sections: dict[str, list[dict[str, str]]] = {}
    for one in findings:
        told = {"subject": one.subject, "state": str(one.state), "text": one.text}
        told |= {"remedy": one.remedy} if one.remedy else {}
        sections.setdefault(one.section, []).append(told)
    return {"healthy": not has_failed(findings), "findings": sections}


def as_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields lines for a terminal. The findings of a section must be adjacent."""
    width = max((len(finding.subject) for finding in findings), default=0)
    named: dict[Severity, list[str]] = {state: [] for state in Severity}
    for section, members in groupby(findings, key=lambda finding: finding.section):
        yield f"{section}:"
        for finding in members:
            named[finding.state].append(f"{section}: {finding.subject}")
            yield f"  {finding.state:<4}  {finding.subject:<{width}}  {finding.text}"
            if finding.remedy:
                yield f"  {'':<4}  {'':<{width}}  → {finding.remedy}"
        yield ""
    if warned := named[Severity.WARN]:
        yield f"could be better: {', '.join(warned)}"
    failed = named[Severity.FAIL]
    yield f"does not work: {', '.join(failed)}" if failed else "everything that was asked for works"
