"""A clock for code that takes one as an argument."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock that moves only when a test sets `now`."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now
