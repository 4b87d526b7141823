"""What a page is made of: pictures with captions and legends, in sections. Frozen data, plain text but for the SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traces.reports.palette import Look, look_of
from traces.reports.summary import summary
from traces.simulator.results import SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A result with its place on the page: number and look are the same everywhere."""

    number: int
    look: Look
    result: SimulationResult
    figures: Mapping[str, Any]  # its summary

    @property
    def title(self) -> str:
        return f"{self.number} {self.result.name}"


def subjects_of(results: Sequence[SimulationResult]) -> list[Subject]:
    return [
        Subject(number=index + 1, look=look_of(index), result=result, figures=summary(result))
        for index, result in enumerate(results)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a legend."""

    label: str
    look: Look
    filled: bool = False  # a box instead of a line


def keys_of(subjects: Sequence[Subject], *, filled: bool = False) -> tuple[Key, ...]:
    return tuple(Key(label=each.title, look=each.look, filled=filled) for each in subjects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One drawing."""

    title: str
    svg: str
    note: str = ""  # smaller, behind the title
    legend: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Pictures that answer one question. One without pictures is left out of the page."""

    title: str
    note: str
    pictures: tuple[Picture, ...]
    legend: tuple[Key, ...] = ()  # of all its pictures
    narrow: bool = False  # small pictures, several in a row
