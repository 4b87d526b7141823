"""Predicts when a session sends its next request, from its own pauses and from those after similar requests. Pure.

A *pause* is the time from the end of a reply to the session's next request. Requests with tools are followed by the
runs of these tools, the others by people, so each kind has its own statistics.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_SESSIONS = 16_384
"""About a kilobyte each. The ones whose last request is the oldest are forgotten first."""
FORGET_S = 900.0
"""A session without a request for so long has ended."""
MIN_OWN, MIN_ALIKE = 3, 20
"""Pauses from which a session, or a kind of request, is predicted."""
MIN_RETURNS = 0.5
"""Share of a kind's requests that must have been followed by another one."""
WITHIN = 0.9
"""Share of the pauses that end before `within_s` (measured: docs/store-eviction.md)."""
REPLY_WEIGHT = 0.02
"""Weight of the latest reply in the mean duration of replies."""


class Prediction(NamedTuple):
    """When the next request is likely to come, in seconds after the arrival of the current one."""

    within_s: float
    source: str  # "the session" or the kind of request


@dataclass(slots=True, eq=False)
class _Session:
    kind: str = ""  # of its latest request
    began_at: float = 0.0
    ended_at: float | None = None  # None = its request is in progress
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=8))


class SessionReturns:
    """The pauses of the sessions of one gateway. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # oldest latest request first
        self._alike: dict[str, deque[float]] = {}  # pauses by kind of request; inf = no request followed
        self.reply_s = 0.0
        """Mean duration of a reply, from the arrival of its request."""
        self._num_replies = 0

    def began(self, session_id: str, kind: str, now: float) -> Prediction | None:
        """Records a request and predicts the one after it. None = none is likely, or too little is known."""
        session = self._sessions.pop(session_id, None) or _Session()
        if session.ended_at is not None:
            session.pauses.append(now - session.ended_at)
            self._record(session.kind, now - session.ended_at)
        session.kind, session.began_at, session.ended_at = kind, now, None
        self._sessions[session_id] = session
        self._forget(now)
        alike = self._alike.get(kind, ())
        pauses, source = sorted(session.pauses), "the session"
        if len(pauses) < MIN_OWN:
            pauses, source = sorted(pause for pause in alike if pause < math.inf), kind
            if len(alike) < MIN_ALIKE or len(pauses) < MIN_RETURNS * len(alike):
                return None
        return Prediction(pauses[math.ceil(WITHIN * len(pauses)) - 1] + self.reply_s, source)

    def ended(self, session_id: str, now: float) -> None:
        """Records the end of the reply to the session's latest request."""
        session = self._sessions.get(session_id)
        if session is not None and session.ended_at is None:
            session.ended_at = now
            self._num_replies += 1
            weight = max(REPLY_WEIGHT, 1 / self._num_replies)  # plain mean at first
            self.reply_s += weight * (now - session.began_at - self.reply_s)

    def _forget(self, now: float) -> None:
        """Forgets the sessions that have ended, and those above the bound."""
        while self._sessions:
            session_id, oldest = next(iter(self._sessions.items()))
            is_over = now - oldest.began_at > FORGET_S and oldest.ended_at is not None
            if not is_over and len(self._sessions) <= MAX_SESSIONS:
                return
            del self._sessions[session_id]
            self._record(oldest.kind, math.inf)

    def _record(self, kind: str, pause_s: float) -> None:
        self._alike.setdefault(kind, deque(maxlen=256)).append(pause_s)
