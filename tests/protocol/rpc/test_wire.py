"""Tests of messages between processes: values arrive unchanged, and unset fields get their defaults."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.conductor import events
from moonserve.protocol.kv_blocks import BlockKey, KvLayout
from moonserve.protocol.membership.registry import Member
from moonserve.protocol.pb import common_pb2, conductor_pb2, registry_pb2, worker_pb2
from moonserve.protocol.request import (
    LOGPROB_DTYPE,
    RANK_DTYPE,
    Endpoint,
    FinishReason,
    GatewayId,
    InstanceId,
    Logprobs,
    Placement,
    PrefillReport,
    PrefixSource,
    PromptLogprobs,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Token,
)
from moonserve.protocol.rpc import wire
from moonserve.protocol.step_time import DEFAULT_PREFILL, PrefillProfile

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
LOAD = events.Load(num_waiting=1, traffic=(events.TrafficTotals(peer=InstanceId("s0"), read_bytes=7),))
WORDS = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(tuple), max_size=3)


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (common_pb2.Placement, PLACEMENT),
        (registry_pb2.Member, Member(endpoint=AT, role="store", owner="o", facts={"a": "1"})),
        (conductor_pb2.RegisterRequest, events.Register(endpoint=AT, role=Role.STORE)),
        (
            conductor_pb2.RegisterRequest,
            events.Register(
                endpoint=AT,
                role=Role.DECODE,
                layout=LAYOUT,
                prefill_profile=PrefillProfile(c0=1.0, c1=2.0, c2=3.0),
                home_store=InstanceId("s0"),
                reads_prompts=True,
            ),
        ),
        (conductor_pb2.HeartbeatRequest, events.Heartbeat(instance_id=AT.instance_id, epoch=1, load=LOAD)),
        (conductor_pb2.Load, events.Load(steps=events.StepTotals(num_steps=3, seconds=0.5))),
        (
            conductor_pb2.ReportRequest,
            events.Report(request_id=RequestId("r"), phase=events.RequestPhase.FAILED, elapsed_s=1.0, queue_s=0.0),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_is_equal_after_conversion(message: type, sent: object) -> None:
    arrived = message.FromString(wire.to_message(message, sent).SerializeToString())
    assert wire.from_message(type(sent), arrived) == sent


def test_unset_field_has_its_default() -> None:
    request = conductor_pb2.RegisterRequest(endpoint={"instance_id": "p"}, role="ROLE_PREFILL")
    register = wire.from_message(events.Register, request)
    assert (register.layout, register.home_store) == (None, None)
    assert register.prefill_profile is DEFAULT_PREFILL
    assert wire.from_message(events.Load, conductor_pb2.Load()).steps is events.NO_STEPS
    with pytest.raises(KeyError):
        wire.from_message(events.Register, conductor_pb2.RegisterRequest())


@given(
    words=WORDS,
    wanted=st.none() | st.integers(0, 20),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=9),
    keys=st.lists(st.binary(min_size=16, max_size=16), max_size=3),
)
def test_submission_is_equal_after_conversion(
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
    message = wire.submission_to_wire(sent, PLACEMENT)
    assert wire.request_from_wire(message) == sent
    assert wire.from_message(Placement, message.placement) == PLACEMENT


@pytest.mark.parametrize("reason", [None, *FinishReason])
@pytest.mark.parametrize("logprobs", [None, Logprobs(-0.5), Logprobs(-0.5, ((7, -0.5), (8, -1.0)))])
def test_token_is_equal_after_conversion(reason: FinishReason | None, logprobs: Logprobs | None) -> None:
    sent = Token(request_id=RequestId("r"), index=3, token_id=7, logprobs=logprobs, finish_reason=reason)
    assert wire.token_from_wire(wire.token_to_wire(sent), with_logprobs=logprobs is not None) == sent


def found(num_tokens: int, num_top: int) -> PromptLogprobs:
    random = np.random.default_rng(num_tokens)
    shape = (num_tokens, num_top)
    return PromptLogprobs(
        logprobs=random.normal(size=num_tokens).astype(LOGPROB_DTYPE),
        ranks=random.integers(1, 2**32, num_tokens).astype(RANK_DTYPE),
        top_ids=random.integers(0, 2**32, shape).astype(RANK_DTYPE),
        top_logprobs=random.normal(size=shape).astype(LOGPROB_DTYPE),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_are_equal_after_conversion(num_tokens: int, num_top: int) -> None:
    times, logprobs = {"queue_s": 0.0, "load_s": 0.0, "compute_s": 0.5}, found(num_tokens, num_top)
    sent = PrefillReport(request_id=RequestId("r"), cached_tokens=0, prompt_logprobs=logprobs, **times)
    report = wire.from_message(PrefillReport, wire.to_message(worker_pb2.PrefillReport, sent))
    assert report.compute_s == 0.5
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        one, other = getattr(sent.prompt_logprobs, name), getattr(report.prompt_logprobs, name)
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def test_arrays_of_inconsistent_sizes_are_refused() -> None:
    message = wire.prompt_logprobs_to_wire(found(4, 2))
    message.top_ids = message.top_ids[:-4]
    with pytest.raises(ValueError, match="reshape"):
        wire.prompt_logprobs_from_wire(message)
