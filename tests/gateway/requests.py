"""One request's state, and the events that a test tells it."""

from __future__ import annotations

from typing import Any

from gateway.generation.events import (
    Placed,
    TokensArrived,
)
from gateway.generation.state import RequestState
from protocol.ids import RequestId
from protocol.request import (
    Endpoint,
    Placement,
    SamplingParams,
    Token,
    finish_reason,
)

EOS = 99


class Letters:
    """Token 3 is `d`; the stop string is `z`."""

    stopped = False
    includes_stop = False

    def push(self, token_id: int) -> str:
        self.stopped = token_id == 25
        return "" if self.stopped else chr(ord("a") + token_id)

    def finish(self) -> str:
        return ""


def new_state(max_tokens: int = 5, deadline_at: float = 100.0) -> RequestState:
    return RequestState(
        request_id=RequestId("r"),
        prompt=(7, 8, 9),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({EOS})),
        output=Letters(),
        deadline_at=deadline_at,
    )


def endpoint(name: str, epoch: int = 1) -> Endpoint:
    return Endpoint(instance_id=name, epoch=epoch, rpc_address=name, transfer_address="", host="h")


def placement(prefill: str = "p0", decode: str = "d0", *, epoch: int = 1) -> Placement:
    return Placement(
        request_id=RequestId("r"), prefill=endpoint(prefill, epoch), decode=endpoint(decode, epoch)
    )


def placed(state: RequestState, *, epoch: int = 1, now: float = 1.0, **names: str) -> list:
    event = Placed(attempt=state.attempt, placement=placement(**names, epoch=epoch))
    return state.handle(event, now)


def arrived(
    state: RequestState, *indexes: int, attempt: int | None = None, ids: dict | None = None
) -> list[Any]:
    tokens = []
    for index in indexes:
        token_id = (ids or {}).get(index, index)
        reason = finish_reason(state.sampling, index, token_id)
        tokens.append(
            Token(request_id=state.attempt_id, index=index, token_id=token_id, finish_reason=reason)
        )
    event = TokensArrived(attempt=attempt or state.attempt, tokens=tuple(tokens))
    return state.handle(event, 2.0)


def of(kind: type, actions: list) -> list:
    return [action for action in actions if isinstance(action, kind)]
