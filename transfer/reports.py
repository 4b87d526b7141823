"""What a lane asks of, and tells to, whoever it works for. Knows no peer and no session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from protocol.errors import MoonserveError
from transfer.base import Session
from transfer.plan import Part
from transfer.rails.paths import Path

if TYPE_CHECKING:
    from transfer.lane import Lane

Connect = Callable[[Path, float, Callable[[], None]], Session]
"""(path, deadline, while_waiting) → session."""


class Reports(Protocol):
    """What a lane tells; called from the thread that carries it."""

    def arrived(self, lane: Lane, part: Part, seconds: float) -> None:
        """The part has ended well."""

    def refused(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        """The peer refused it, or it arrived corrupt; the session lives on."""

    def lost(
        self, lane: Lane, parts: Sequence[Part], error: MoonserveError, *, connected: bool
    ) -> None:
        """The session broke under them, or (not `connected`) could not be had."""

    def ended(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        """It was not begun and shall not be: cancelled, overdue or given up."""

    def opened(self, lane: Lane) -> None:
        """It has a session now."""

    def closed(self, lane: Lane) -> None:
        """It has none any more."""

    def fenced(self, connection_ids: Iterable[int]) -> None:
        """The target serves nothing of these any more."""

    def fell_idle(self) -> None:
        """A lane has nothing to do any more."""

    def may_retire(self, lane: Lane) -> bool:
        """Asked by an idle lane; after True it ends."""
