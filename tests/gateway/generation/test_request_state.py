"""Lifecycle of one request: events in, actions out. Whatever happens, each token comes once and the end comes once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.cluster.avoided_instances import AVOID_LOST_S
from moonserve.gateway.generation import events
from moonserve.gateway.generation.request_state import MAX_ATTEMPTS, PATIENCE_S, Phase, RequestState
from moonserve.protocol import errors
from moonserve.protocol.request import Placement, PrefillReport, RequestId, SamplingParams, Token, finish_reason
from tests.prefill_worker.builders import endpoint

EOS = 99
ERRORS: dict[str, errors.MoonserveError] = {
    "lost": errors.PeerLost("gone"),
    "lost itself": errors.PeerLost("it was", instance_id="p0"),
    "bad bytes": errors.IntegrityError("bad bytes"),
    "no worker": errors.NoWorker("none"),
    "overloaded": errors.Overloaded("full", retry_after_s=2.0),
    "not leader": errors.NotLeader("not me"),
    "invalid": errors.InvalidRequest("no"),
    "left": errors.Cancelled("left"),
}


class Letters:
    """Text output in which token 3 is `d` and the stop string is `z`."""

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


def event_of(state: RequestState, words: str, **fields: Any) -> events.Event:
    """Parses an event such as `placed d1 epoch 2`, `tokens 0 1=25`, `place failed: lost`, `d0 lost`."""
    attempt = fields.pop("attempt", state.attempt)
    what, _, error = words.partition(": ")
    match what.split():
        case ["due"]:
            return events.PlaceDue(attempt=attempt)
        case ["placed", *names]:
            epoch = int(names.pop()) if names[-2:-1] == ["epoch"] else 1
            decode = names[0] if names and names[0] != "epoch" else "d0"
            ends = {"prefill": endpoint("p0", epoch=epoch), "decode": endpoint(decode, epoch=epoch)}
            made = Placement(request_id=RequestId("r"), **ends)
            return events.Placed(attempt=attempt, placement=made, **fields)
        case ["tokens", *changes]:
            pairs = [each.partition("=") for each in changes]
            ids = {int(index): int(token_id or index) for index, _, token_id in pairs}
            reasons = {index: finish_reason(state.sampling, index, token_id) for index, token_id in ids.items()}
            tokens = (
                Token(request_id=state.attempt_id, index=index, token_id=token_id, finish_reason=reasons[index])
                for index, token_id in ids.items()
            )
            return events.TokensArrived(attempt=attempt, tokens=tuple(tokens))
        case ["place", "failed"]:
            return events.PlaceFailed(attempt=attempt, error=ERRORS[error], **fields)
        case ["submit", "failed"]:
            return events.SubmitFailed(attempt=attempt, error=ERRORS["lost"])
        case ["aborted"]:
            return events.Aborted(error=ERRORS["left"])
        case [name, "lost"]:
            return events.InstanceLost(instance_id=name, error=ERRORS["lost"])
        case [name, "failed"]:
            return events.WorkerFailed(attempt=attempt, instance_id=name, error=ERRORS[error])
    raise ValueError(words)


def in_words(state: RequestState, actions: list[Any]) -> list[str]:
    """Describes each action in words, with the fields that tests compare."""
    words = []
    for action in actions:
        match action:
            case events.Place():
                excluded = [f"{name}@{epoch}" for name, epoch in sorted(action.excluded)]
                assert action.token_ids == (*state.prompt, *state.generated)
                assert action.max_tokens == state.sampling.max_tokens - len(state.generated)
                words.append(" ".join(["place", action.request_id, *excluded]))
            case events.Pause():
                words.append("pause")
            case events.CancelAttempt():
                where = [each.instance_id for each in action.endpoints]
                words.append(" ".join(["cancel", action.request_id, *where]))
            case events.Report():
                words.append(f"report {action.request_id} {action.phase}")
            case events.Piece():
                words.append(" ".join(filter(None, ["emit", action.text, action.finish_reason])))
            case events.Fail():
                words.append(f"fail {action.error.code}")
            case _:
                assert action.token_ids == (*state.prompt, *state.generated)
                words.append(f"submit {action.request_id}")
    return words


# A step: an event, its other fields, its time (default: the time of the step before), and the expected actions.
Step = tuple[str, *tuple[float | dict[str, Any], ...], str]
PLACED: Step = ("placed", 1.0, "submit r")
FIRST: Step = ("tokens 0", "report r first_token, emit a")
DECODING = [PLACED, FIRST, ("tokens 1", "emit b")]
LOST: Step = ("d0 lost", 3.0, "cancel r p0 d0, report r failed, place r~2 d0@1")
LOST_AT_ONCE = "cancel r p0 d0, report r failed, place r~2 "
NO_WORKER = "place failed: no worker"

LIVES: dict[str, list[Step]] = {
    "a request is placed, submitted, read and finished": [
        PLACED, FIRST, ("tokens 1 2 3 4", "emit bcde length, report r finished"),
    ],
    "a stop token ends it and has no text": [
        *DECODING, (f"tokens 2={EOS}", "emit stop, report r finished"),
    ],
    "a stop string ends it and cancels at both workers": [
        *DECODING, ("tokens 2=25 3", "emit stop, report r finished, cancel r p0 d0"),
    ],
    "tokens that came before are ignored": [
        *DECODING, ("tokens 0 1", ""), ("tokens 1 2", "emit c"),
    ],
    "tokens of decode may overtake the first one": [
        PLACED, ("tokens 1", ""), ("tokens 2 3", ""),
        ("tokens 0", "report r first_token, emit abcd"),
    ],
    "one that is missing behind the first is a loss": [
        PLACED, ("tokens 2", ""), ("tokens 0", LOST_AT_ONCE.strip()),
    ],
    "a gap is a loss, and it goes on elsewhere from what was emitted": [
        *DECODING, ("tokens 3", LOST_AT_ONCE.strip()), ("placed d1", "submit r~2"),
        ("tokens 2", "report r~2 first_token, emit c"),
    ],
    "a lost decode worker is replaced": [*DECODING, LOST],
    "a lost prefill worker is replaced while it is needed": [
        PLACED, FIRST, ("p0 lost", LOST_AT_ONCE + "p0@1"),
    ],
    "when the handoff is over it is not": [*DECODING, ("p0 lost", "")],
    "one that has both roles is cancelled and avoided once, before the first token": [
        ("placed p0", "submit r"), ("p0 lost", "cancel r p0, report r failed, place r~2 p0@1"),
    ],
    "and after it": [
        ("placed p0", "submit r"), FIRST, ("p0 lost", "cancel r p0, report r failed, place r~2 p0@1"),
    ],
    "one that has no part in it matters to nobody": [PLACED, FIRST, ("d7 lost", "")],
    "who says that its peer is lost accuses the peer": [
        PLACED, ("p0 failed: lost", LOST_AT_ONCE + "d0@1"),
    ],
    "who is named by the error is at fault": [
        PLACED, ("p0 failed: lost itself", LOST_AT_ONCE + "p0@1"),
    ],
    "who has bad bytes is at fault": [PLACED, ("d0 failed: bad bytes", LOST_AT_ONCE + "d0@1")],
    "a failed submission is its prefill worker's fault": [
        PLACED, ("submit failed", LOST_AT_ONCE + "p0@1"),
    ],
    "a failure that repeating cannot help ends it": [
        PLACED, ("p0 failed: invalid", "cancel r p0 d0, report r failed, fail invalid_request"),
    ],
    "no attempt begins after the deadline": [
        PLACED, ("submit failed", 101.0, LOST_AT_ONCE.replace("place r~2 ", "fail deadline")),
    ],
    "a client that leaves cancels at both workers, and its end is reported once": [
        *DECODING, ("aborted", "cancel r p0 d0, report r cancelled, fail cancelled"), ("aborted", ""),
    ],
    "a placement that comes too late is given back": [
        ("aborted", "fail cancelled"), ("placed", "report r cancelled"),
    ],
    # Waiting for workers or a conductor
    "the first placement is refused at once where all are full": [
        ("place failed: overloaded", "fail overloaded"),
    ],
    "and where nobody is": [(NO_WORKER, "fail no_worker")],
    "it waits while no conductor leads, until its patience ends": [
        ("place failed: not leader", "pause"), ("due", 0.5, "place r"),
        ("place failed: not leader", 30.0, "fail not_leader"),
    ],
    "or none answers": [("place failed: lost", "pause"), ("due", 0.5, "place r")],
    "with tokens it waits for a worker to come back, until its patience ends": [
        *DECODING, LOST, (NO_WORKER, "pause"), ("due", 3.5, "place r~2 d0@1"),
        (NO_WORKER, 30.0, "fail no_worker"),
    ],
    "and for room": [*DECODING, LOST, ("place failed: overloaded", "pause")],
    "who failed is still avoided after a refused second attempt": [
        PLACED, ("p0 failed: bad bytes", LOST_AT_ONCE + "p0@1"), ("place failed: overloaded", "pause"),
        ("due", "place r~2 p0@1"),
    ],
    "who only failed gets another chance when there is nobody else": [
        PLACED, ("p0 failed: bad bytes", LOST_AT_ONCE + "p0@1"), (NO_WORKER, "pause"), ("due", "place r~2"),
    ],
    "who broke is let in again once the conductor must have noticed its death": [
        *DECODING, LOST, (NO_WORKER, 3.0 + AVOID_LOST_S, "pause"), ("due", "place r~2"),
    ],
    "a lost incarnation is waited out without an attempt": [
        *DECODING, LOST,
        *[
            ("placed", 3.5, "report r~2 cancelled, pause"), ("due", "place r~2 d0@1"),
            (NO_WORKER, "pause"), ("due", "place r~2 d0@1"),
        ] * 4,
        ("placed epoch 2", 8.0, "submit r~2"),
    ],
    "one that is listed long after its loss lives": [
        *DECODING, LOST, ("placed", 8.9, "report r~2 cancelled, pause"), ("due", 9.2, "place r~2 d0@1"),
        ("placed", 9.2, "submit r~2"),
    ],
    "patience with a lost incarnation ends where no token renews it": [
        *DECODING, LOST, (NO_WORKER, "pause"), ("due", 3.25, "place r~2 d0@1"),
        ("placed epoch 2", 4.0, "submit r~2"),
        ("d0 lost", 22.0, "cancel r~2 p0 d0, report r~2 failed, place r~3 d0@1 d0@2"),
        ("placed epoch 2", 3.5 + PATIENCE_S, "report r~3 cancelled, fail no_worker"),
    ],
    "a token renews it": [
        *DECODING, LOST, (NO_WORKER, "pause"), ("due", 3.25, "place r~2 d0@1"),
        ("placed epoch 2", 4.0, "submit r~2"), ("tokens 2", "report r~2 first_token, emit c"),
        ("d0 lost", 22.0, "cancel r~2 p0 d0, report r~2 failed, place r~3 d0@1 d0@2"),
        ("placed epoch 2", 3.5 + PATIENCE_S, "report r~3 cancelled, pause"),
    ],
    "one that cannot be submitted waits for the restart": [
        PLACED, ("submit failed", LOST_AT_ONCE + "p0@1"), ("placed", 1.5, "report r~2 cancelled, pause"),
        ("due", 1.75, "place r~2 p0@1"), ("placed epoch 2", 8.0, "submit r~2"),
    ],
    "a new request waits for workers that were there a moment ago": [
        (NO_WORKER, {"may_return": True}, "pause"), ("due", 30.0, "place r"),
        (NO_WORKER, {"may_return": True}, "fail no_worker"),
    ],
    "but not for a crowd to go": [("place failed: overloaded", {"may_return": True}, "fail overloaded")],
    "who broke is let in again once it speaks on a new connection": [
        *DECODING, LOST, (NO_WORKER, {"open_since": {("d0", 1): 2.9, ("d1", 1): 9.0}}, 3.2, "pause"),
        ("due", "place r~2 d0@1"), (NO_WORKER, {"open_since": {("d0", 1): 3.1}}, "pause"), ("due", "place r~2"),
    ],
    # The conductor made this placement before it knew of the loss; the gateway learned of the loss first.
    "a placement with who has a successor is given back": [
        ("placed", {"replaced": frozenset({"p0"})}, 1.0, "report r cancelled, pause"), ("due", "place r"),
    ],
    "an abandoned attempt is not heard any more": [
        *DECODING, LOST, ("placed d1", "submit r~2"), ("tokens 2", {"attempt": 1}, ""),
    ],
    "a worker that sent bad bytes has not broken": [
        PLACED, ("d0 failed: bad bytes", LOST_AT_ONCE + "d0@1"), ("placed", "submit r~2"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", LIVES)
def test_scenario(name: str) -> None:
    state, now = new_state(), 0.0
    assert in_words(state, state.handle(event_of(state, "due"), now)) == ["place r"]
    for event, *more, expected in LIVES[name]:
        fields = next((each for each in more if isinstance(each, dict)), {})
        now = next((each for each in more if isinstance(each, float)), now)
        actions = state.handle(event_of(state, event, **fields), now)
        assert ", ".join(in_words(state, actions)) == expected, event
        state.validate()


@pytest.mark.parametrize(
    ("error", "num_tokens", "num_lost"),
    [
        ("lost", 0, MAX_ATTEMPTS),
        ("lost", 1, MAX_ATTEMPTS),  # the prefill worker always produces one token
        ("lost", 20, None),  # each attempt made progress
        ("no worker", 0, None),  # taken out of service in an orderly way
    ],
)
def test_request_fails_after_max_attempts(error: str, num_tokens: int, num_lost: int | None) -> None:
    """A request that breaks its decode worker fails after MAX_ATTEMPTS losses, so that it does not break every one."""
    state = new_state(max_tokens=1_000)
    state.handle(event_of(state, "due"), 0.0)
    for attempt in range(1, 2 * MAX_ATTEMPTS):
        state.handle(event_of(state, f"placed epoch {attempt}"), 1.0)
        begin = len(state.generated)
        indexes = range(begin, begin + num_tokens)
        state.handle(event_of(state, " ".join(["tokens", *(f"{i}=1" for i in indexes)])), 1.0)
        *_, last = in_words(state, state.handle(event_of(state, f"d0 failed: {error}"), 2.0))
        if attempt == num_lost:
            assert last.startswith("fail")
            return
        assert last.startswith("place")
    assert num_lost is None


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    state = new_state()
    for cached in (2, 500):
        report = PrefillReport(request_id=RequestId("r"), cached_tokens=cached, queue_s=0, load_s=0, compute_s=0)
        state.handle(events.Reported(attempt=1, report=report), 1.0)
    assert state.cached_tokens == 2


STEPS = st.lists(st.integers(0, 8), min_size=1, max_size=4).map(
    lambda indexes: " ".join(["tokens", *map(str, indexes)])
) | st.sampled_from(
    ["placed", "placed epoch 2", "p0 lost", "d0 lost", "submit failed", NO_WORKER, "due", "aborted",
     "d0 failed: bad bytes", "late"]
)  # fmt: skip


@given(st.lists(STEPS, max_size=25))
def test_tokens_are_emitted_exactly_once_and_the_request_ends_once(steps: list[str]) -> None:
    state = new_state(max_tokens=7)
    actions: list[Any] = list(state.handle(event_of(state, "due"), 0.0))
    for step in steps:
        late = {"attempt": state.attempt + 1} if step == "late" else {}
        event = event_of(state, "tokens 0 1 2" if late else step, **late)
        actions += state.handle(event, 2.0)
        state.validate()
    emitted = [action for action in actions if isinstance(action, events.Piece)]
    indexes = [token.index for piece in emitted for token in piece.tokens]
    assert indexes == list(range(len(indexes)))
    assert "".join(piece.text for piece in emitted) == "abcdefg"[: len(indexes)]
    ends = [each for each in actions if isinstance(each, events.Fail) or (each in emitted and each.finish_reason)]
    assert len(ends) == (state.phase in (Phase.FINISHED, Phase.FAILED))
