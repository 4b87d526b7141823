"""Tests of messages between processes: values arrive unchanged, and receivers recover from lost or repeated ones."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.events import NO_STEPS, Heartbeat, Load, Phase, Register, Report, Steps, Traffic
from protocol import membership
from protocol import streams as event_streams
from protocol.errors import PeerLost
from protocol.ids import GatewayId, InstanceId, RequestId, Role
from protocol.keys import BlockKey, unpack_keys
from protocol.layout import KvLayout
from protocol.membership import BlockLog
from protocol.pb import common_pb2, conductor_pb2, registry_pb2, worker_pb2
from protocol.pb.conductor_pb2 import BlockEvents
from protocol.profile import DEFAULT_PREFILL, PrefillProfile
from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs
from protocol.registry.base import Member
from protocol.request import (
    Endpoint,
    FinishReason,
    Logprobs,
    Placement,
    PrefillReport,
    PrefixSource,
    Request,
    SamplingParams,
    Token,
)
from protocol.streams import GatewayStreams
from protocol.wire import (
    from_message,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    request_from_wire,
    submission_to_wire,
    to_message,
    token_from_wire,
    token_to_wire,
)
from tests.patience import PATIENCE_S

AT = Endpoint(instance_id="p0", epoch=2**62, rpc_address="a:1", transfer_address="b:2", host="here")
LAYOUT = KvLayout(num_layers=2, block_size=16, num_kv_heads=3, head_dim=8, dtype="float32")
PLACEMENT = Placement(
    request_id=RequestId("r"),
    prefill=AT,
    decode=AT,
    prefix_sources=(PrefixSource(store=AT, first_block=1, num_blocks=2),) * 2,
    predicted_ttft_s=0.5,
    rank=-1.5,
)
LOAD = Load(num_waiting=1, traffic=(Traffic(peer=InstanceId("s0"), read_bytes=7),))
WORDS = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(tuple), max_size=3)


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (common_pb2.Placement, PLACEMENT),
        (registry_pb2.Member, Member(endpoint=AT, role="store", owner="o", facts={"a": "1"})),
        (conductor_pb2.RegisterRequest, Register(endpoint=AT, role=Role.STORE)),
        (
            conductor_pb2.RegisterRequest,
            Register(
                endpoint=AT,
                role=Role.DECODE,
                layout=LAYOUT,
                prefill_profile=PrefillProfile(c0=1.0, c1=2.0, c2=3.0),
                home_store=InstanceId("s0"),
                reads_prompts=True,
            ),
        ),
        (conductor_pb2.HeartbeatRequest, Heartbeat(instance_id=AT.instance_id, epoch=1, load=LOAD)),
        (conductor_pb2.Load, Load(steps=Steps(num_steps=3, seconds=0.5))),
        (
            conductor_pb2.ReportRequest,
            Report(request_id=RequestId("r"), phase=Phase.FAILED, elapsed_s=1.0, queue_s=0.0),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_told_arrives_as_it_was(message: type, sent: object) -> None:
    arrived = message.FromString(to_message(message, sent).SerializeToString())
    assert from_message(type(sent), arrived) == sent


def test_what_is_not_said_has_its_default() -> None:
    request = conductor_pb2.RegisterRequest(endpoint={"instance_id": "p"}, role="ROLE_PREFILL")
    register = from_message(Register, request)
    assert (register.layout, register.home_store) == (None, None)
    assert register.prefill_profile is DEFAULT_PREFILL
    assert from_message(Load, conductor_pb2.Load()).steps is NO_STEPS
    with pytest.raises(KeyError):
        from_message(Register, conductor_pb2.RegisterRequest())


@given(
    words=WORDS,
    wanted=st.none() | st.integers(0, 20),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=9),
    keys=st.lists(st.binary(min_size=16, max_size=16), max_size=3),
)
def test_a_submission_arrives_as_it_was(
    words: list[tuple[int, ...]], wanted: int | None, tokens: list[int], keys: list[bytes]
) -> None:
    sampling = SamplingParams(
        max_tokens=9,
        num_logprobs=wanted,
        num_prompt_logprobs=wanted,
        bad_words=tuple(words),
        stop_token_ids=frozenset({3, 1}),
        logit_bias={5: -1.5},
    )
    sent = Request(
        request_id=RequestId("r"),
        gateway_id=GatewayId("g"),
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        block_keys=tuple(map(BlockKey, keys)),
        sampling=sampling,
        timeout_s=3.5,
    )
    message = submission_to_wire(sent, PLACEMENT)
    assert request_from_wire(message) == sent
    assert from_message(Placement, message.placement) == PLACEMENT


@pytest.mark.parametrize("reason", [None, *FinishReason])
@pytest.mark.parametrize("logprobs", [None, Logprobs(-0.5), Logprobs(-0.5, ((7, -0.5), (8, -1.0)))])
def test_tokens_arrive_as_they_were(reason: FinishReason | None, logprobs: Logprobs | None) -> None:
    sent = Token(request_id=RequestId("r"), index=3, token_id=7, logprobs=logprobs, finish_reason=reason)
    assert token_from_wire(token_to_wire(sent), with_logprobs=logprobs is not None) == sent


def found(num_tokens: int, num_top: int) -> PromptLogprobs:
    random = np.random.default_rng(num_tokens)
    shape = (num_tokens, num_top)
    return PromptLogprobs(
        logprobs=random.normal(size=num_tokens).astype(FLOAT),
        ranks=random.integers(1, 2**32, num_tokens).astype(UINT),
        top_ids=random.integers(0, 2**32, shape).astype(UINT),
        top_logprobs=random.normal(size=shape).astype(FLOAT),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_of_prompts_arrive_as_they_were(num_tokens: int, num_top: int) -> None:
    times, logprobs = {"queue_s": 0.0, "load_s": 0.0, "compute_s": 0.5}, found(num_tokens, num_top)
    sent = PrefillReport(request_id=RequestId("r"), cached_tokens=0, prompt_logprobs=logprobs, **times)
    report = from_message(PrefillReport, to_message(worker_pb2.PrefillReport, sent))
    assert report.compute_s == 0.5
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        one, other = getattr(sent.prompt_logprobs, name), getattr(report.prompt_logprobs, name)
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def test_arrays_of_other_sizes_are_refused() -> None:
    message = prompt_logprobs_to_wire(found(4, 2))
    message.top_ids = message.top_ids[:-4]
    with pytest.raises(ValueError, match="reshape"):
        prompt_logprobs_from_wire(message)


GATEWAY = GatewayId("g")


async def test_a_stream_that_ends_after_the_close_gives_nobody_up() -> None:
    """A stream that ends after `close` gives no gateway up, as when a worker changes its role and old streams end."""
    lost: list[GatewayId] = []
    streams = GatewayStreams(lost.append, grace_s=0.0)
    events = streams.events(GATEWAY)
    await anext(events)
    streams.close()
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: failures.append(what))
    await events.aclose()
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, done.set)  # runs after all pending callbacks
    await done.wait()
    assert not lost
    assert not failures


async def test_a_stream_begins_with_how_many_batches_were_taken_before_it() -> None:
    streams = GatewayStreams(lambda gateway_id: None)
    first = streams.events(GATEWAY)
    assert (await anext(first)).standing.num_batches == 0
    await anext(first)  # the waiting events, here none
    streams.send(GATEWAY, failures=[(RequestId("r"), PeerLost("gone"))])
    taken = await anext(first)
    assert taken.failures
    assert not taken.HasField("standing")
    second = streams.events(GATEWAY)
    begun = (await anext(second)).standing
    assert (begun.times_given_up, begun.num_batches) == (0, 2)
    await first.aclose()
    await second.aclose()
    streams.close()


async def test_a_stream_with_nothing_to_say_shows_that_its_worker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "SIGN_OF_LIFE_S", 0.0)
    streams = GatewayStreams(lambda gateway_id: None)
    events = streams.events(GATEWAY)
    await anext(events)
    assert await anext(events) == worker_pb2.EventBatch()
    await events.aclose()
    streams.close()


async def test_a_gateway_that_was_given_up_is_told_when_it_comes_back() -> None:
    lost: asyncio.Queue[GatewayId] = asyncio.Queue()
    streams = GatewayStreams(lost.put_nowait, grace_s=0.0)
    streams.send(GATEWAY, failures=[(RequestId("r"), PeerLost("gone"))])
    for times in (1, 2):  # without a stream, and when its stream has ended
        assert await asyncio.wait_for(lost.get(), PATIENCE_S) == GATEWAY
        back = streams.events(GATEWAY)
        assert (await anext(back)).standing.times_given_up == times
        await back.aclose()
    streams.close()


async def test_a_finished_stream_gives_what_waits_and_ends() -> None:
    """After `finish`, a stream gives the waiting events and ends. So does a stream of a gateway that missed the end."""
    streams = GatewayStreams(lambda _: None)
    events = streams.events(GATEWAY)
    await anext(events)
    token = Token(request_id=RequestId("r"), index=0, token_id=7)
    streams.send(GATEWAY, tokens=[token])
    streams.finish()
    async with asyncio.timeout(PATIENCE_S):
        assert [len(batch.tokens) async for batch in events] == [1]
        assert [len(batch.tokens) async for batch in streams.events(GATEWAY)] == [0, 0]
    streams.close()


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def apply(view: set[BlockKey], events: BlockEvents) -> set[BlockKey]:
    if events.snapshot:
        view = set()
    return (view | set(unpack_keys(events.added_keys))) - set(unpack_keys(events.removed_keys))


def test_changes_replayed_in_order_give_what_is_present() -> None:
    rng = random.Random(7)
    log, view, present = BlockLog(), set(), set()
    for _ in range(2_000):
        number = rng.randrange(20)
        if rng.random() < 0.5:
            log.added(key(number), None)
            present.add(key(number))
        else:
            log.removed(key(number))
            present.discard(key(number))
        if rng.random() < 0.2:
            events = log.changes()
            if rng.random() < 0.5:  # otherwise it is lost, and sent again with later changes
                view = apply(view, events)
                log.acknowledge(events)
    while log.has_changes:
        events = log.changes()
        view = apply(view, events)
        log.acknowledge(events)
    assert view == present == apply(set(), log.snapshot())


def test_too_many_unsent_changes_become_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PENDING", 10)
    log = BlockLog()
    log.added(key(0), None)
    under_way = log.changes()
    for number in range(1, 25):
        log.added(key(number), None)
    log.acknowledge(under_way)
    events = log.changes()
    assert events.snapshot
    assert events.first_seq > under_way.next_seq, "what comes late counts no more"
    assert len(unpack_keys(events.added_keys)) == 25
    log.acknowledge(events)
    assert not log.has_changes
    log.removed(key(3))
    assert not log.changes().snapshot
    assert log.changes().first_seq == events.next_seq
