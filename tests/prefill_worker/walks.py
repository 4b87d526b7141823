"""A prefill worker's state whose requests a test takes by the hand as far as it wants, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from prefill_worker import actions as act
from prefill_worker import events as ev
from protocol.ids import RequestId
from protocol.request import Endpoint, Request
from tests.prefill_worker.builders import granted, make_request, make_state, step_done, submitted
from worker.events import Action, Event

A = TypeVar("A")


def all_of(actions: Iterable[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def only(actions: Iterable[Action], kind: type[A]) -> A:
    """The one action of a kind."""
    found = all_of(actions, kind)
    assert len(found) == 1, f"expected one {kind.__name__} in {list(actions)}"
    return found[0]


def kinds(actions: Iterable[Action]) -> list[type]:
    return [type(action) for action in actions]


def spans(actions: Iterable[Action]) -> list[tuple[str, int, int]]:
    """What the steps among them compute."""
    slices = [plan.slice for step in all_of(actions, act.RunStep) for plan in step.plans]
    return [(piece.request_id, piece.start, piece.end) for piece in slices]


class Walk:
    """Time is what the test says it is; the books are proven after every event."""

    def __init__(self, **options: Any) -> None:
        self.state = make_state(**options)
        self.now = 0.0

    def handle(self, event: Event, at: float | None = None) -> Sequence[Action]:
        self.now = self.now if at is None else at
        actions = self.state.handle(event, self.now)
        self.state.validate()
        return actions

    def submit(
        self,
        name: str = "r",
        num_tokens: int = 6,
        *,
        first: int = 0,
        sources: Sequence[tuple[Endpoint, int, int]] = (),
        rank: float = 0.0,
        at: float | None = None,
        **options: Any,
    ) -> Sequence[Action]:
        request = make_request(name, range(first, first + num_tokens), **options)
        return self.request(request, sources=sources, rank=rank, at=at)

    def request(
        self,
        request: Request,
        *,
        sources: Sequence[tuple[Endpoint, int, int]] = (),
        rank: float = 0.0,
        at: float | None = None,
    ) -> Sequence[Action]:
        return self.handle(submitted(request, sources=sources, rank=rank), at)

    def grant(self, actions: Iterable[Action], *, num_cached: int = 0, at: float | None = None) -> Sequence[Action]:
        """The decode worker's answer to the reservation among these."""
        return self.handle(granted(only(actions, act.ReserveLanding), num_cached=num_cached), at)

    def start(self, name: str = "r", num_tokens: int = 6, *, num_cached: int = 0, **options: Any) -> act.RunStep:
        """Submits a request and grants its landing; gives its first step."""
        submission = self.submit(name, num_tokens, **options)
        return only(self.grant(submission, num_cached=num_cached), act.RunStep)

    def done(self, step: act.RunStep, at: float | None = None, *, token_id: int = 42) -> Sequence[Action]:
        return self.handle(step_done(step, token_id=token_id), at)

    def written(self, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.WritesDone(request_id=RequestId(name)), at)

    def commit(self, name: str = "r", num_tokens: int = 6) -> act.CommitHandoff:
        """From a submission to the commit, in one step."""
        self.done(self.start(name, num_tokens))
        return only(self.written(name), act.CommitHandoff)

    def accept(self, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.HandoffAccepted(request_id=RequestId(name)), at)

    def corrupt(self, *indexes: int, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.HandoffCorrupt(request_id=RequestId(name), indexes=indexes), at)

    def cancel(self, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.RequestCancelled(request_id=RequestId(name)), at)

    def assert_drained(self) -> None:
        assert self.state.is_idle
        assert self.state.num_held_blocks == 0
