"""What `moonserve doctor` found, as text for people and as JSON for programs.

Owns the form. Its rule: a problem is something that was asked for and does not work, and it says what
to do; everything else that could be better is a note. Looks at nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


_MARKS = {State.OK: "ok", State.NOTE: "note", State.PROBLEM: "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `facts` are the same things as `text`, for programs."""

    section: str
    subject: str
    state: State
    text: str
    advice: str = ""
    """What to do about it; empty where there is nothing to do."""
    facts: Mapping[str, Any] = field(default_factory=dict)


def has_problems(findings: Sequence[Finding]) -> bool:
    return any(finding.state is State.PROBLEM for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Sections as lists of findings, in order."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for finding in findings:
        sections.setdefault(finding.section, []).append(_entry(finding))
    return {"healthy": not has_problems(findings), "findings": sections}


def as_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines for a terminal; the findings of a section follow each other."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for section, members in groupby(findings, key=lambda finding: finding.section):
        yield f"{section}:"
        for finding in members:
            yield f"  {_MARKS[finding.state]:<4}  {finding.subject:<{width}}  {finding.text}"
            if finding.advice:
                yield f"  {'':<4}  {'':<{width}}  → {finding.advice}"
        yield ""
    problems = [finding for finding in findings if finding.state is State.PROBLEM]
    names = ", ".join(f"{finding.section}: {finding.subject}" for finding in problems)
    yield f"does not work: {names}" if problems else "everything that was asked for works"


def _entry(finding: Finding) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "subject": finding.subject,
        "state": str(finding.state),
        "text": finding.text,
    }
    if finding.advice:
        entry["advice"] = finding.advice
    if finding.facts:
        entry["facts"] = dict(finding.facts)
    return entry


def size(num_bytes: float) -> str:
    """In the unit that people read: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2f} GB/s"
