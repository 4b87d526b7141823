"""Frames come out as they went in, however the stream was cut; nothing else comes out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.lean import frames
from protocol.lean.frames import CANCEL, LENGTH, MAX_MESSAGE_BYTES, MalformedFrame, Reply, Request, Status

ids = st.integers(0, frames.MAX_CALL_ID)
requests = st.tuples(ids, st.integers(0, 99), st.integers(0, 10**6), st.binary(max_size=300))
replies = st.builds(Reply, ids, st.sampled_from([0, 1]), st.binary(max_size=300))


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(requests, max_size=8), st.lists(st.integers(0, 10**4), max_size=12))
def test_requests_survive_any_cut_of_the_stream(sent: list[tuple[int, int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frames.request(i, m, ms / 1000, body) for i, m, ms, body in sent)
    reader = frames.request_reader()
    found = [request for piece in pieces(stream, cuts) for request in reader.feed(piece)]
    assert [(r.call_id, r.method, r.payload) for r in found] == [(i, m, b) for i, m, _, b in sent]
    for request, (_, _, deadline_ms, _) in zip(found, sent, strict=True):
        assert deadline_ms <= request.deadline_ms <= deadline_ms + 1


@given(st.lists(replies, max_size=8), st.lists(st.integers(0, 10**4), max_size=12))
def test_replies_survive_any_cut_of_the_stream(sent: list[Reply], cuts: list[int]) -> None:
    stream = b"".join(frames.reply(r.call_id, Status(r.status), r.payload) for r in sent)
    reader = frames.reply_reader()
    assert [reply for piece in pieces(stream, cuts) for reply in reader.feed(piece)] == sent


@given(st.binary(max_size=400), st.lists(st.integers(0, 10**4), max_size=6))
def test_garbage_gives_frames_or_a_refusal_and_nothing_else(data: bytes, cuts: list[int]) -> None:
    reader = frames.request_reader()
    try:
        for piece in pieces(data, cuts):
            assert all(isinstance(request, Request) for request in reader.feed(piece))
    except MalformedFrame:
        return


@pytest.mark.parametrize("length", [0, 11, 12 + MAX_MESSAGE_BYTES + 1, 0xFFFF_FFFF])
def test_an_impossible_length_is_refused_by_its_four_bytes(length: int) -> None:
    with pytest.raises(MalformedFrame):
        frames.request_reader().feed(LENGTH.pack(length))


def test_the_largest_length_is_waited_for() -> None:
    assert frames.request_reader().feed(LENGTH.pack(12 + MAX_MESSAGE_BYTES)) == []


def test_a_payload_over_the_limit_is_not_sent() -> None:
    with pytest.raises(InvalidRequest, match="larger than the limit"):
        frames.request(1, 0, 1.0, bytes(MAX_MESSAGE_BYTES + 1))


def test_a_cancel_is_a_request_without_payload() -> None:
    assert frames.request_reader().feed(frames.cancel(7)) == [Request(7, CANCEL, 0, b"")]


@pytest.mark.parametrize(("timeout_s", "deadline_ms"), [(-1.0, 1), (0.0001, 1), (1e12, 2**32 - 1)])
def test_deadlines_stay_within_their_field(timeout_s: float, deadline_ms: int) -> None:
    (request,) = frames.request_reader().feed(frames.request(1, 0, timeout_s, b""))
    assert request.deadline_ms == deadline_ms
