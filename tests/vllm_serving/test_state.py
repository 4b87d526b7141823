"""Requests of a vLLM worker end once, in tokens, a handoff or a failure, in whatever order events come."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.errors import Cancelled, DeadlineExceeded, Incompatible, NoWorker, PeerError, PeerLost
from moonserve.protocol.request import (
    Endpoint,
    FinishReason,
    GatewayId,
    Placement,
    PrefillReport,
    Request,
    RequestId,
    SamplingParams,
    Token,
)
from moonserve.vllm.serving.state import (
    Abort,
    Arrived,
    EngineState,
    Generate,
    Generated,
    GenerationFailed,
    HandedOff,
    HandOff,
    Send,
    Stopping,
)
from moonserve.worker.events import Action, Event, Fail, GatewayLost, RequestCancelled, Submitted, Tick
from tests.prefill_worker.builders import make_request
from tests.thoroughness import examples

_ID = RequestId("r")
_NOW = 100.0


def _endpoint(name: str) -> Endpoint:
    return Endpoint(instance_id=name, epoch=1, rpc_address=f"{name}:1", transfer_address="", host="h")


def _request(request_id: RequestId = _ID, num_generated: int = 0, timeout_s: float = 60.0) -> Request:
    request = make_request(request_id, range(20))
    return replace(
        request,
        token_ids=(*request.token_ids, *range(num_generated)),
        num_prompt_tokens=20,
        sampling=SamplingParams(max_tokens=8),
        timeout_s=timeout_s,
    )


def _submitted(request: Request | None = None) -> Submitted:
    request = request or _request()
    placement = Placement(
        request_id=request.request_id, prefill=_endpoint("prefill-0"), decode=_endpoint("decode-0"), rank=7.5
    )
    return Submitted(request=request, placement=placement)


def _arrived(request_id: RequestId = _ID) -> Arrived:
    return Arrived(request=_request(request_id, 1), kv_transfer_params='{"a": 1}', transfer_s=0.25)


def _token(index: int, request_id: RequestId = _ID, *, last: bool = False) -> Token:
    reason = FinishReason.STOP if last else None
    return Token(request_id=request_id, index=index, token_id=40 + index, finish_reason=reason)


_REPORT = PrefillReport(request_id=_ID, cached_tokens=0, queue_s=0.5, load_s=0.0, compute_s=0.2)


def _first(*, last: bool = False, params: str = '{"b": 2}') -> Generated:
    return Generated(request_id=_ID, tokens=(_token(0, last=last),), report=_REPORT, kv_transfer_params=params)


class _World:
    """A state that is checked after each event."""

    def __init__(self) -> None:
        self.state = EngineState()
        self.now = _NOW

    def __call__(self, event: Event) -> list[Action]:
        actions = self.state.handle(event, self.now)
        self.state.validate()
        return actions


@pytest.fixture(name="world")
def fixture_world() -> _World:
    return _World()


def test_a_prefill_sends_its_token_and_hands_the_request_off_with_it(world: _World) -> None:
    [generate] = world(_submitted())
    assert isinstance(generate, Generate)
    assert (generate.is_prefill, generate.place) == (True, _NOW + 7.5)
    world.now += 1.0
    sent, handed = world(_first())
    assert isinstance(sent, Send)
    assert sent.prefill is not None
    assert isinstance(handed, HandOff)
    assert handed.decode.instance_id == "decode-0"
    assert handed.kv_transfer_params == '{"b": 2}'
    assert handed.request.token_ids == (*_request().token_ids, 40)
    assert handed.request.first_index == 1
    assert handed.request.timeout_s == pytest.approx(59.0)
    assert not world.state.is_idle
    assert world(HandedOff(request_id=_ID)) == []
    assert world.state.is_idle


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_an_answer_of_one_token_is_not_handed_off(world: _World, max_tokens: int) -> None:
    """Its KV is not held for a decode server either, if it is known before."""
    request = replace(_request(), sampling=SamplingParams(max_tokens=max_tokens))
    [generate] = world(_submitted(request))
    assert isinstance(generate, Generate)
    assert generate.is_prefill == (max_tokens == 8)
    [sent] = world(_first(last=True))
    assert isinstance(sent, Send)
    assert world.state.is_idle


def test_a_worker_that_both_prefills_and_decodes_generates_to_the_end(world: _World) -> None:
    submitted = _submitted()
    [generate] = world(replace(submitted, placement=replace(submitted.placement, decode=_endpoint("prefill-0"))))
    assert isinstance(generate, Generate)
    assert not generate.is_prefill
    assert len(world(_first())) == 1
    assert not world.state.is_idle


def test_a_decode_worker_reports_with_its_first_token_only(world: _World) -> None:
    [generate] = world(_arrived())
    assert isinstance(generate, Generate)
    assert (generate.is_prefill, generate.kv_transfer_params) == (False, '{"a": 1}')
    [first] = world(Generated(request_id=_ID, tokens=(_token(1),), report=_REPORT))
    [second] = world(Generated(request_id=_ID, tokens=(_token(2),), report=_REPORT))
    assert isinstance(first, Send)
    assert first.decode is not None
    assert (first.decode.transfer_s, first.decode.queue_s) == (0.25, 0.5)
    assert isinstance(second, Send)
    assert second.decode is None
    assert world.state.context_tokens == 21 + 2


def test_a_repeated_handoff_starts_nothing_also_after_its_end(world: _World) -> None:
    assert len(world(_arrived())) == 1
    assert world(_arrived()) == []
    world(Generated(request_id=_ID, tokens=(_token(1, last=True),), report=_REPORT))
    assert world.state.is_idle
    assert world.state.refusal(_ID, world.now) is None
    assert world(_arrived()) == []


def test_a_cancellation_that_comes_first_holds(world: _World) -> None:
    assert world(RequestCancelled(request_id=_ID)) == []
    assert isinstance(world.state.refusal(_ID, world.now), Cancelled)
    [failed] = world(_arrived())
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, Cancelled)


def test_a_cancellation_aborts_generation_and_handoff(world: _World) -> None:
    world(_submitted())
    assert world(RequestCancelled(request_id=_ID)) == [Abort(request_id=_ID)]
    assert world(_first()) == []
    other = RequestId("other")
    world(_submitted(_request(other)))
    world(Generated(request_id=other, tokens=(_token(0, other),), report=_REPORT))
    assert world(RequestCancelled(request_id=other)) == [Abort(request_id=other)]
    assert world(HandedOff(request_id=other)) == []


def test_a_draining_decode_worker_refuses_new_handoffs_only(world: _World) -> None:
    world(_arrived())
    world.state.is_draining = True
    assert world.state.refusal(_ID, world.now) is None
    assert isinstance(world.state.refusal(RequestId("new"), world.now), NoWorker)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(PeerLost("gone"), PeerLost), (Incompatible("other weights"), PeerError), (NoWorker("draining"), NoWorker)],
)
def test_a_failed_handoff_is_retryable_and_names_the_decode_worker(
    world: _World, error: PeerLost, expected: type
) -> None:
    world(_submitted())
    world(_first())
    [failed] = world(HandedOff(request_id=_ID, error=error))
    assert isinstance(failed, Fail)
    assert type(failed.error) is expected
    assert failed.error.retryable
    assert failed.error.ids["decode"] == "decode-0"


def test_a_deadline_ends_a_request(world: _World) -> None:
    world(_submitted(_request(timeout_s=5.0)))
    world.now += 4.9
    assert world(Tick()) == []
    assert world.state.wake_at == _NOW + 5.0
    world.now += 0.1
    failed, aborted = world(Tick())
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, DeadlineExceeded)
    assert aborted == Abort(request_id=_ID)


def test_a_lost_gateway_aborts_its_requests_only(world: _World) -> None:
    world(_arrived())
    other = RequestId("other")
    elsewhere = _arrived(other)
    world(replace(elsewhere, request=replace(elsewhere.request, gateway_id=GatewayId("gateway-1"))))
    assert world(GatewayLost(gateway_id=GatewayId("gateway-1"))) == [Abort(request_id=other)]


def test_requests_of_a_worker_that_stops_can_continue_elsewhere(world: _World) -> None:
    world(_arrived())
    failed, _ = world(Stopping())
    assert isinstance(failed, Fail)
    assert failed.error.retryable
    assert world.state.is_idle


def _events() -> Iterator[Event]:
    for name in ("a", "b"):
        request_id = RequestId(name)
        yield _submitted(_request(request_id))
        yield _arrived(request_id)
        yield Generated(request_id=request_id, tokens=(_token(0, request_id),), report=_REPORT, kv_transfer_params="{}")
        yield Generated(request_id=request_id, tokens=(_token(1, request_id, last=True),), report=_REPORT)
        yield GenerationFailed(request_id=request_id, error=NoWorker("dead"))
        yield HandedOff(request_id=request_id)
        yield HandedOff(request_id=request_id, error=PeerLost("gone"))
        yield RequestCancelled(request_id=request_id)


@given(st.lists(st.sampled_from([*_events(), Tick(), Stopping()]), max_size=25))
@settings(max_examples=examples(2000), deadline=None)
def test_whatever_comes_a_request_is_accepted_once_and_ends_once(events: list[Event]) -> None:
    """Outcomes come only for operations that are under way, since an aborted one reports nothing."""
    world = _World()
    under_way: dict[RequestId, type] = {}
    started: list[RequestId] = []
    for event in events:
        wanted = {Generated: Generate, GenerationFailed: Generate, HandedOff: HandOff}.get(type(event))
        if wanted is not None and under_way.get(event.request_id) is not wanted:  # type: ignore[attr-defined]
            continue
        if isinstance(event, HandedOff | GenerationFailed):
            under_way.pop(event.request_id)
        world.now += 1.0
        for action in world(event):
            if isinstance(action, Generate | HandOff):
                under_way[action.request.request_id] = type(action)
                if isinstance(action, Generate):
                    started.append(action.request.request_id)
            elif isinstance(action, Abort):
                under_way.pop(action.request_id)
            elif isinstance(action, Send) and action.tokens[-1].finish_reason is not None:
                under_way.pop(action.tokens[-1].request_id)
    assert len(started) == len(set(started))
    assert len(under_way) == (0 if world.state.is_idle else len(under_way))
    world(Stopping())
    assert world.state.is_idle
