"""Requests taken by the hand as far as a test wants them, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.state import PrefillState
from protocol.ids import RequestId
from tests.prefill_worker.builders import (
    granted,
    make_request,
    step_done,
    submitted,
)

A = TypeVar("A")


def only(actions: Iterable[act.Action], kind: type[A]) -> A:
    """The one action of a kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"expected one {kind.__name__} in {list(actions)}"
    return found[0]


def kinds(actions: Iterable[act.Action]) -> list[type]:
    return [type(action) for action in actions]


def run_to_first_step(
    state: PrefillState, name: str = "r", num_tokens: int = 6, **options: int
) -> act.RunStep:
    """Submits a request and grants its landing; gives its first step."""
    request = make_request(name, range(num_tokens))
    reserve = only(state.handle(submitted(request), 0.0), act.ReserveLanding)
    return only(state.handle(granted(reserve, **options), 1.0), act.RunStep)


def run_to_commit(state: PrefillState, name: str = "r", num_tokens: int = 6) -> act.CommitHandoff:
    """… and computes and sends everything in one step."""
    step = run_to_first_step(state, name, num_tokens)
    state.handle(step_done(step), 2.0)
    return only(state.handle(ev.WritesDone(request_id=RequestId(name)), 3.0), act.CommitHandoff)


def assert_drained(state: PrefillState) -> None:
    state.validate()
    assert state.is_idle
    assert state.num_held_blocks == 0
