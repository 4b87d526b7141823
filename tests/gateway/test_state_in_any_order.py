"""One request's life, whatever happens to it: each token once, and one end."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.events import (
    Aborted,
    Emit,
    Fail,
    InstanceLost,
    PlaceFailed,
    RetryDue,
    Started,
    SubmitFailed,
    WorkerFailed,
)
from gateway.state import Phase
from protocol.errors import (
    Cancelled,
    IntegrityError,
    NoWorker,
    PeerLost,
)
from tests.gateway.requests import arrived, new_state, of, placed

STEPS = st.one_of(
    st.tuples(st.just("tokens"), st.lists(st.integers(0, 8), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["placed", "lost p0", "lost d0", "submit failed", "no worker"])),
    st.tuples(st.sampled_from(["retry", "abort", "worker failed", "late", "restarted"])),
)


@given(st.lists(STEPS, max_size=25))
def test_whatever_happens_tokens_are_emitted_exactly_once_and_the_end_comes_once(
    steps: list[tuple[Any, ...]],
) -> None:
    state = new_state(max_tokens=7)
    actions = state.handle(Started(), 0.0)
    for kind, *rest in steps:
        match kind:
            case "tokens":
                actions += arrived(state, *rest[0])
            case "placed":
                actions += placed(state)
            case "restarted":
                actions += placed(state, epoch=2)
            case "lost p0" | "lost d0":
                lost = InstanceLost(instance_id=kind[-2:], error=PeerLost("x"))
                actions += state.handle(lost, 2.0)
            case "submit failed":
                actions += state.handle(
                    SubmitFailed(attempt=state.attempt, error=PeerLost("x")), 2.0
                )
            case "no worker":
                actions += state.handle(
                    PlaceFailed(attempt=state.attempt, error=NoWorker("x")), 2.0
                )
            case "retry":
                actions += state.handle(RetryDue(attempt=state.attempt), 2.0)
            case "abort":
                actions += state.handle(Aborted(error=Cancelled("x")), 2.0)
            case "worker failed":
                failed = WorkerFailed(
                    attempt=state.attempt, instance_id="d0", error=IntegrityError("x")
                )
                actions += state.handle(failed, 2.0)
            case "late":
                actions += arrived(state, 0, 1, 2, attempt=state.attempt + 1)
        state.validate()
    indexes = [token.index for emit in of(Emit, actions) for token in emit.tokens]
    assert indexes == list(range(len(indexes)))
    ends = len(of(Fail, actions)) + sum(e.finish_reason is not None for e in of(Emit, actions))
    assert ends == (state.phase in (Phase.FINISHED, Phase.FAILED))
