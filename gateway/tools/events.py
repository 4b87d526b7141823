"""What text says of tool calls, piece by piece. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of this function; what follows are its arguments."""

    index: int  # of the call in its message
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are one JSON object in all, as the model wrote it."""

    index: int
    text: str


Event = Content | CallStarted | Arguments
