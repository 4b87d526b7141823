"""One request's state, the events that a test tells it, and its actions in words."""

from __future__ import annotations

from typing import Any

from gateway.generation.events import (
    Aborted,
    CancelAt,
    Event,
    Fail,
    InstanceLost,
    Pause,
    Piece,
    Place,
    Placed,
    PlaceDue,
    PlaceFailed,
    Report,
    SubmitFailed,
    TokensArrived,
    WorkerFailed,
)
from gateway.generation.state import RequestState
from protocol.errors import (
    Cancelled,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    NotLeader,
    NoWorker,
    Overloaded,
    PeerLost,
)
from protocol.ids import RequestId
from protocol.request import Endpoint, Placement, SamplingParams, Token, finish_reason

EOS = 99
ERRORS: dict[str, MoonserveError] = {
    "lost": PeerLost("gone"),
    "lost itself": PeerLost("it was", instance_id="p0"),
    "bad bytes": IntegrityError("bad bytes"),
    "no worker": NoWorker("none"),
    "overloaded": Overloaded("full", retry_after_s=2.0),
    "not leader": NotLeader("not me"),
    "invalid": InvalidRequest("no"),
    "left": Cancelled("left"),
}


class Letters:
    """Token 3 is `d`; the stop string is `z`."""

    stopped = False
    includes_stop = False

    def push(self, token_id: int) -> str:
        self.stopped = token_id == 25
        return "" if self.stopped else chr(ord("a") + token_id)

    def finish(self) -> str:
        return ""


def new_state(max_tokens: int = 5) -> RequestState:
    return RequestState(
        request_id=RequestId("r"),
        prompt=(7, 8, 9),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({EOS})),
        output=Letters(),
        deadline_at=100.0,
    )


def endpoint(name: str, epoch: int = 1) -> Endpoint:
    return Endpoint(instance_id=name, epoch=epoch, rpc_address=name, transfer_address="", host="h")


def arrived(state: RequestState, token_ids: dict[int, int], attempt: int) -> TokensArrived:
    """Tokens by their index."""
    tokens = []
    for index, token_id in token_ids.items():
        reason = finish_reason(state.sampling, index, token_id)
        token = Token(request_id=state.attempt_id, index=index, token_id=token_id, finish_reason=reason)
        tokens.append(token)
    return TokensArrived(attempt=attempt, tokens=tuple(tokens))


def event_of(state: RequestState, words: str, **fields: Any) -> Event:
    """`placed d1 epoch 2`, `tokens 0 1=25`, `place failed: lost`, `d0 lost`, `p0 failed: bad bytes`, …"""
    attempt = fields.pop("attempt", state.attempt)
    what, _, error = words.partition(": ")
    match what.split():
        case ["due"]:
            return PlaceDue(attempt=attempt)
        case ["placed", *names]:
            epoch = int(names.pop()) if names[-2:-1] == ["epoch"] else 1
            decode = names[0] if names and names[0] != "epoch" else "d0"
            ends = {"prefill": endpoint("p0", epoch), "decode": endpoint(decode, epoch)}
            made = Placement(request_id=RequestId("r"), **ends)
            return Placed(attempt=attempt, placement=made, **fields)
        case ["tokens", *told]:
            pairs = [each.partition("=") for each in told]
            ids = {int(index): int(token_id or index) for index, _, token_id in pairs}
            return arrived(state, ids, attempt)
        case ["place", "failed"]:
            return PlaceFailed(attempt=attempt, error=ERRORS[error], **fields)
        case ["submit", "failed"]:
            return SubmitFailed(attempt=attempt, error=ERRORS["lost"])
        case ["aborted"]:
            return Aborted(error=ERRORS["left"])
        case [name, "lost"]:
            return InstanceLost(instance_id=name, error=ERRORS["lost"])
        case [name, "failed"]:
            return WorkerFailed(attempt=attempt, instance_id=name, error=ERRORS[error])
    raise ValueError(words)


def in_words(state: RequestState, actions: list[Any]) -> list[str]:
    """One action each, with what tests look at."""
    words = []
    for action in actions:
        match action:
            case Place():
                excluded = [f"{name}@{epoch}" for name, epoch in sorted(action.excluded)]
                assert action.token_ids == (*state.prompt, *state.generated)
                assert action.max_tokens == state.sampling.max_tokens - len(state.generated)
                words.append(" ".join(["place", action.request_id, *excluded]))
            case Pause():
                words.append("pause")
            case CancelAt():
                where = [each.instance_id for each in action.endpoints]
                words.append(" ".join(["cancel", action.request_id, *where]))
            case Report():
                words.append(f"report {action.request_id} {action.phase}")
            case Piece():
                words.append(" ".join(filter(None, ["emit", action.text, action.finish_reason])))
            case Fail():
                words.append(f"fail {action.error.code}")
            case _:
                assert action.token_ids == (*state.prompt, *state.generated)
                words.append(f"submit {action.request_id}")
    return words
