"""Leader election among conductors: one candidate's view of one claim in the registry. Pure: `now` is an argument.

Rule: a candidate leads only while no other candidate can hold the claim. Its term starts when it *sent* the request, on
its own clock, and is shorter than the claim by `CLOCK_DRIFT`. A leader that cannot renew steps down by itself, whether
or not the registry can be reached. If a claim is granted but this candidate did not see the previous claim expire (the
registry may have lost its data), it waits a whole `ttl_s` before it leads. Knows no registry and no clock.

```
FOLLOWING ─ claim ─► CLAIMING ─ granted ─► LEADING ─ renew ─► RENEWING ─ renewed ─► LEADING
    ▲ ◄── refused, silence ──┘                │ time is over       │ time is over
    └─────────────────────────────────────────┴─── any answer ─── LAPSED
```
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

CLOCK_DRIFT = 0.1
"""Largest relative drift between two clocks. Quartz drifts by 1e-4, so this covers virtual machines too."""
MARGIN_S = 0.05
"""Delay after the end of another candidate's claim. Registries round to milliseconds, and timers fire early."""
_HISTORY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerms:
    """Durations of a claim; the same for all candidates."""

    ttl_s: float = 2.0

    @property
    def held_s(self) -> float:
        """Time for which the holder relies on the claim."""
        return self.ttl_s * (1 - CLOCK_DRIFT)

    @property
    def renew_every_s(self) -> float:
        """Time between renewals, and the timeout of a request; three tries fit into `held_s`."""
        return self.ttl_s / 4


class ElectionPhase(StrEnum):
    """State of a candidate."""

    FOLLOWING = "following"
    CLAIMING = "claiming"
    LEADING = "leading"  # holds the claim; leads from `_leads_from` on
    RENEWING = "renewing"
    LAPSED = "lapsed"  # the term ended before the answer to the renewal arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; sent at `LeaderElectionState.due_at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """The claim was granted, under an epoch above all earlier ones."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRefused:
    """Another candidate holds the claim, for `retry_after_s` more unless it renews."""

    retry_after_s: float
    leader_address: str | None
    epoch: int  # of the claim; 0 = unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The claim was renewed, counted from when the renewal was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The registry has no claim of this candidate under this epoch."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySilent:
    """The registry did not answer; the request may have taken effect, or may still do so."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Request the claim with an epoch above `known_epoch`."""

    known_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Request renewal of the claim."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginLeading:
    """Start answering calls, from an empty conductor state."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDown:
    """Refuse calls again."""

    epoch: int
    reason: str


Answer = Claimed | ClaimRefused | Renewed | Lost | RegistrySilent
Event = Tick | Answer
Action = Claim | Renew | BeginLeading | StepDown


class IllegalEvent(AssertionError):
    """An answer arrived that was not requested, which is a bug of the shell. The message lists the preceding events."""


@dataclass(slots=True, eq=False)
class LeaderElectionState:
    """State machine of one candidate. At most one registry request is in flight at a time."""

    terms: ClaimTerms
    due_at: float = 0.0  # time of the next Tick; infinite while waiting for an answer
    phase: ElectionPhase = ElectionPhase.FOLLOWING
    # The phases in which a field is valid are listed in capitals.
    epoch: int = 0  # LEADING, RENEWING: of the claim; LAPSED: of the claim that ended
    known_epoch: int = 0  # the highest epoch seen
    leader_address: str | None = None  # of another leader, as last reported by the registry
    _asked_at: float = 0.0  # CLAIMING, RENEWING, LAPSED
    _leads_from: float = 0.0  # LEADING, RENEWING
    _leads_until: float = 0.0  # LEADING, RENEWING
    _renew_at: float = 0.0  # LEADING
    _has_begun: bool = False  # BeginLeading was issued for this claim
    _other_until: float | None = None  # end of another candidate's claim, as of the last answer; None = unknown
    # Time at which another candidate's claim was first seen after the last own claim.
    _follows_since: float | None = None
    _history: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY))  # for messages

    def leads(self, now: float) -> bool:
        """Returns True if this candidate leads at `now`. Checked at each call: a suspended process resumes late."""
        return self._has_begun and self._leads_from <= now < self._leads_until

    def handle(self, event: Event, now: float) -> list[Action]:
        """Applies one event and returns the actions. Raises IllegalEvent, without any change, for an answer that was
        not requested."""
        name = type(event).__name__
        if not isinstance(event, Tick) and type(event) not in _AWAITED.get(self.phase, ()):
            raise IllegalEvent(f"{name} while {self.phase}, after {', '.join(self._history)}")
        self._history.append(f"{self.phase}/{name}@{now:.3f}")
        actions = self._lapse(now)
        actions += _HANDLERS[self.phase, type(event)](self, event, now)
        self._set_due()
        return actions

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        assert self.epoch <= self.known_epoch
        if self.phase in _HOLDING:
            assert self.epoch > 0
            assert self._leads_from < self._leads_until or not self._has_begun
            assert self.due_at <= self._leads_until
        else:
            assert not self._has_begun, "leads without a claim"
            assert self._leads_until <= self._leads_from, "a claim that ended counts yet"

    # Time

    def _lapse(self, now: float) -> list[Action]:
        if self.phase not in _HOLDING or now < self._leads_until:
            return []
        phase = ElectionPhase.LAPSED if self.phase is ElectionPhase.RENEWING else ElectionPhase.FOLLOWING
        return self._give_up(phase, "the claim could not be renewed in time", now)

    def _give_up(self, phase: ElectionPhase, reason: str, now: float) -> list[Action]:
        begun, self._has_begun = self._has_begun, False
        self._leads_from = self._leads_until = now
        self._other_until = self._follows_since = None
        self.phase, self.due_at = phase, now
        return [StepDown(epoch=self.epoch, reason=reason)] if begun else []

    def _begin_if_due(self, now: float) -> list[Action]:
        if self._has_begun or not self._leads_from <= now < self._leads_until:
            return []
        self._has_begun = True
        self.leader_address = None
        return [BeginLeading(epoch=self.epoch)]

    def _set_due(self) -> None:
        if self.phase in (ElectionPhase.CLAIMING, ElectionPhase.LAPSED):
            self.due_at = math.inf
        if self.phase not in _HOLDING:
            return
        times = [self._leads_until]
        if not self._has_begun:
            times.append(self._leads_from)
        if self.phase is ElectionPhase.LEADING:
            times.append(self._renew_at)
        self.due_at = min(times)

    # Handlers; if the term has ended, `_lapse` changes the phase before the handler is selected

    def _on_tick_following(self, event: Tick, now: float) -> list[Action]:
        if now < self.due_at:
            return []
        self.phase, self._asked_at = ElectionPhase.CLAIMING, now
        return [Claim(known_epoch=self.known_epoch)]

    def _on_tick_holding(self, event: Tick, now: float) -> list[Action]:
        actions = self._begin_if_due(now)
        if self.phase is ElectionPhase.LEADING and now >= self._renew_at:
            self.phase, self._asked_at = ElectionPhase.RENEWING, now
            actions.append(Renew(epoch=self.epoch))
        return actions

    def _on_tick_waiting(self, event: Tick, now: float) -> list[Action]:
        return []

    def _on_claimed(self, event: Claimed, now: float) -> list[Action]:
        self.epoch, self.known_epoch = event.epoch, max(self.known_epoch, event.epoch)
        saw_the_end = self._other_until is not None and self._other_until <= self._asked_at
        self._other_until = None
        self._leads_from = self._asked_at + (0.0 if saw_the_end else self.terms.ttl_s)
        self._leads_until = self._asked_at + self.terms.held_s
        self._renew_at = self._asked_at + self.terms.renew_every_s
        self.phase = ElectionPhase.LEADING
        if now >= self._leads_until:  # the answer came after the end of the term
            return self._give_up(ElectionPhase.FOLLOWING, "", now)
        return self._begin_if_due(now)

    def _on_refused(self, event: ClaimRefused, now: float) -> list[Action]:
        self.known_epoch = max(self.known_epoch, event.epoch)
        self.leader_address = event.leader_address
        self._other_until = now + event.retry_after_s
        if self._follows_since is None:
            self._follows_since = now
        in_turn = now + self.terms.renew_every_s
        # A claim requested just before the other one ends could be granted just after, and would then have to wait.
        is_early = in_turn + MARGIN_S < self._other_until
        self.phase, self.due_at = ElectionPhase.FOLLOWING, in_turn if is_early else self._in_order(now)
        return []

    def _in_order(self, now: float) -> float:
        """Returns when to claim after the other claim ends. A restarted leader lets its standby go first."""
        assert self._other_until is not None
        assert self._follows_since is not None
        is_new = now - self._follows_since < self.terms.ttl_s
        return self._other_until + MARGIN_S + (self.terms.renew_every_s / 2 if is_new else 0.0)

    def _on_unclaimed(self, event: RegistrySilent, now: float) -> list[Action]:
        self._other_until = None
        self.phase, self.due_at = ElectionPhase.FOLLOWING, now + self.terms.renew_every_s
        return []

    def _on_renewed(self, event: Renewed, now: float) -> list[Action]:
        self._leads_until = self._asked_at + self.terms.held_s
        self._renew_at = self._asked_at + self.terms.renew_every_s
        self.phase = ElectionPhase.LEADING
        return self._begin_if_due(now)

    def _on_not_renewed(self, event: RegistrySilent, now: float) -> list[Action]:
        self._renew_at = now + self.terms.renew_every_s / 2
        self.phase = ElectionPhase.LEADING
        return self._begin_if_due(now)

    def _on_lost(self, event: Lost, now: float) -> list[Action]:
        return self._give_up(ElectionPhase.FOLLOWING, event.reason, now)

    def _on_late_answer(self, event: Answer, now: float) -> list[Action]:
        self.phase, self.due_at = ElectionPhase.FOLLOWING, now
        return []


_HOLDING = frozenset({ElectionPhase.LEADING, ElectionPhase.RENEWING})
_RENEWALS = (Renewed, Lost, RegistrySilent)
_AWAITED: dict[ElectionPhase, tuple[type, ...]] = {
    ElectionPhase.CLAIMING: (Claimed, ClaimRefused, RegistrySilent),
    ElectionPhase.RENEWING: _RENEWALS,
    ElectionPhase.LAPSED: _RENEWALS,
}

# One row per phase and event; typed loosely because each handler takes its own event class.
_HANDLERS: dict[tuple[ElectionPhase, type], Callable[..., list[Action]]] = {
    (ElectionPhase.FOLLOWING, Tick): LeaderElectionState._on_tick_following,
    (ElectionPhase.CLAIMING, Tick): LeaderElectionState._on_tick_waiting,
    (ElectionPhase.LEADING, Tick): LeaderElectionState._on_tick_holding,
    (ElectionPhase.RENEWING, Tick): LeaderElectionState._on_tick_holding,
    (ElectionPhase.LAPSED, Tick): LeaderElectionState._on_tick_waiting,
    (ElectionPhase.CLAIMING, Claimed): LeaderElectionState._on_claimed,
    (ElectionPhase.CLAIMING, ClaimRefused): LeaderElectionState._on_refused,
    (ElectionPhase.CLAIMING, RegistrySilent): LeaderElectionState._on_unclaimed,
    (ElectionPhase.RENEWING, Renewed): LeaderElectionState._on_renewed,
    (ElectionPhase.RENEWING, Lost): LeaderElectionState._on_lost,
    (ElectionPhase.RENEWING, RegistrySilent): LeaderElectionState._on_not_renewed,
    (ElectionPhase.LAPSED, Renewed): LeaderElectionState._on_late_answer,
    (ElectionPhase.LAPSED, Lost): LeaderElectionState._on_late_answer,
    (ElectionPhase.LAPSED, RegistrySilent): LeaderElectionState._on_late_answer,
}
