"""What `moonserve doctor` found, as text for people and as JSON for programs.

Owns the form and the words. `fail` is what was asked for and does not work, or what nothing works without; `warn` is
what works and could be better; each of both says what to do about it. Looks at nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `facts` are the same things as `text`, for programs."""

    section: str
    subject: str
    state: State
    text: str
    remedy: str = ""
    """What to do about it; empty where all is well."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.remedy or self.state is State.OK, f"{self.subject}: what can be done about it?"


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.state is State.FAIL for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Sections as lists of findings, in order."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for finding in findings:
        sections.setdefault(finding.section, []).append(_entry(finding))
    return {"healthy": not has_failed(findings), "findings": sections}


def as_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines for a terminal; the findings of a section follow each other."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for section, members in groupby(findings, key=lambda finding: finding.section):
        yield f"{section}:"
        for finding in members:
            yield f"  {finding.state:<4}  {finding.subject:<{width}}  {finding.text}"
            if finding.remedy:
                yield f"  {'':<4}  {'':<{width}}  → {finding.remedy}"
        yield ""
    failed, warned = _named(findings, State.FAIL), _named(findings, State.WARN)
    if warned:
        yield f"could be better: {', '.join(warned)}"
    yield f"does not work: {', '.join(failed)}" if failed else "everything that was asked for works"


def _named(findings: Sequence[Finding], state: State) -> list[str]:
    return [f"{f.section}: {f.subject}" for f in findings if f.state is state]


def _entry(finding: Finding) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "subject": finding.subject,
        "state": str(finding.state),
        "text": finding.text,
    }
    if finding.remedy:
        entry["remedy"] = finding.remedy
    if finding.facts:
        entry["facts"] = dict(finding.facts)
    return entry
