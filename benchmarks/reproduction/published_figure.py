"""A reproduced figure: the simulations that it needs, and the evaluation of their results. Frozen data.

A figure is two pure functions: `runs` names simulations of the trace, `finding` turns their results into rows. So runs
that several figures share are simulated once, in any order and process. Changing texts simulates nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moonserve.traces.experiments.parallel_runs import Job
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.results import SimulationResult

CONVERSATION, TOOL_AGENT, SYNTHETIC = "conversation", "toolagent", "synthetic"
KINDS = (CONVERSATION, TOOL_AGENT, SYNTHETIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTrace:
    """The trace to reproduce figures of, and the other public traces in its folder."""

    name: str  # of the file
    kind: str | None  # one of KINDS, by the file's name; None = nothing is published of it
    records: Sequence[TraceRecord]
    others: Mapping[str, Sequence[TraceRecord]] = field(default_factory=dict)  # by kind

    def published(self, value: float) -> float | None:
        """Returns a value published for the conversation trace if this is it, else None."""
        return value if self.is_conversation else None

    @property
    def is_conversation(self) -> bool:
        return self.kind == CONVERSATION


@dataclass(frozen=True, slots=True)
class Row:
    """One number and its published counterpart."""

    what: str
    ours: float | None
    published: float | None = None  # None = nothing is published for this trace
    unit: str = ""  # "s", "ms", "%" (of fractions), "" for counts and ratios
    why: str = ""  # reason for the difference

    @property
    def ratio(self) -> float | None:
        """Ours ÷ published; None if either is missing."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    label: str
    points: tuple[tuple[float, float], ...]
    is_published: bool = False  # drawn as marks without a line


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over one axis. `y_unit` "%" shows fractions as per cent."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    y_unit: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureResult:
    """The results of a figure."""

    rows: tuple[Row, ...] = ()
    # Statement that the figure should show → True if ours does.
    claims: Mapping[str, bool] = field(default_factory=dict)
    plots: tuple[Plot, ...] = ()
    why: str = ""  # reason for differences from the published numbers


Results = Mapping[str, SimulationResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published figure."""

    name: str  # as in --only and in JSON: "figure-5"
    title: str
    setting: str  # how ours is made
    evaluate: Callable[[PublicTrace, Results], FigureResult]
    # The only trace that published numbers are available for; None = not bound to one.
    published_for: str | None = None
    runs: Callable[[PublicTrace], Mapping[str, Job]] = lambda _: {}  # depends on the trace only

    def missing(self, subject: PublicTrace) -> str:
        """Returns a sentence if nothing is published for this trace, else an empty string."""
        if self.published_for in (None, subject.kind):
            return ""
        return f"Published for the {self.published_for} trace; for this one there is nothing to compare with."
