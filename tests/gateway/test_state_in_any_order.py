"""One request's life, whatever happens to it: each token once, and one end."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.events import (
    Aborted,
    Fail,
    InstanceLost,
    Piece,
    PlaceDue,
    PlaceFailed,
    SubmitFailed,
    WorkerFailed,
)
from gateway.generation.state import Phase
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
    actions = state.handle(PlaceDue(), 0.0)
    for kind, *rest in steps:
        attempt, lost = state.attempt, PeerLost("x")
        match kind:
            case "tokens":
                actions += arrived(state, *rest[0])
            case "late":
                actions += arrived(state, 0, 1, 2, attempt=attempt + 1)
            case "placed" | "restarted":
                actions += placed(state, epoch=1 + (kind == "restarted"))
            case _:
                event = {
                    "lost p0": InstanceLost(instance_id="p0", error=lost),
                    "lost d0": InstanceLost(instance_id="d0", error=lost),
                    "submit failed": SubmitFailed(attempt=attempt, error=lost),
                    "no worker": PlaceFailed(attempt=attempt, error=NoWorker("x")),
                    "retry": PlaceDue(attempt=attempt),
                    "abort": Aborted(error=Cancelled("x")),
                    "worker failed": WorkerFailed(
                        attempt=attempt, instance_id="d0", error=IntegrityError("x")
                    ),
                }[kind]
                actions += state.handle(event, 2.0)
        state.validate()
    emitted = of(Piece, actions)
    indexes = [token.index for emit in emitted for token in emit.tokens]
    assert indexes == list(range(len(indexes)))
    assert "".join(emit.text for emit in emitted) == "abcdefg"[: len(indexes)]
    ends = len(of(Fail, actions)) + sum(e.finish_reason is not None for e in of(Piece, actions))
    assert ends == (state.phase in (Phase.FINISHED, Phase.FAILED))
