"""Tests of frames, which survive any cut of the stream, and of the handshake, in which both sides prove the token."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.errors import Incompatible, MoonserveError, Unauthenticated
from moonserve.protocol.rpc import frames
from moonserve.protocol.rpc.frames import LENGTH, MAX_MESSAGE_BYTES, FrameReader, MalformedFrame, Reply, Request, Status
from moonserve.protocol.rpc.handshake import NONCE_BYTES, Initiator, Responder, advance

ids = st.integers(0, frames.MAX_CALL_ID)
requests = st.tuples(ids, st.integers(0, 99), st.integers(0, 10**6), st.binary(max_size=300))
replies = st.builds(Reply, ids, st.sampled_from([0, 1]), st.binary(max_size=300))


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(requests, max_size=8), st.lists(st.integers(0, 10**4), max_size=12))
def test_requests_are_read_from_any_chunks(sent: list[tuple[int, int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frames.request(i, m, ms / 1000, body) for i, m, ms, body in sent)
    reader = FrameReader(frames.REQUEST, Request)
    found = [request for piece in pieces(stream, cuts) for request in reader.feed(piece)]
    assert [(r.call_id, r.method, r.payload) for r in found] == [(i, m, b) for i, m, _, b in sent]
    for request, (_, _, deadline_ms, _) in zip(found, sent, strict=True):
        assert deadline_ms <= request.deadline_ms <= deadline_ms + 1


@given(st.lists(replies, max_size=8), st.lists(st.integers(0, 10**4), max_size=12))
def test_replies_are_read_from_any_chunks(sent: list[Reply], cuts: list[int]) -> None:
    stream = b"".join(frames.reply(r.call_id, Status(r.status), r.payload) for r in sent)
    reader = FrameReader(frames.REPLY, Reply)
    assert [reply for piece in pieces(stream, cuts) for reply in reader.feed(piece)] == sent


@given(st.binary(max_size=400), st.lists(st.integers(0, 10**4), max_size=6))
def test_garbage_gives_only_frames_or_malformed_frame(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(frames.REQUEST, Request)
    try:
        for piece in pieces(data, cuts):
            assert all(isinstance(request, Request) for request in reader.feed(piece))
    except MalformedFrame:
        return


@pytest.mark.parametrize("length", [0, 11, 12 + MAX_MESSAGE_BYTES + 1, 0xFFFF_FFFF])
def test_impossible_length_is_refused_from_its_four_bytes(length: int) -> None:
    with pytest.raises(MalformedFrame):
        FrameReader(frames.REQUEST, Request).feed(LENGTH.pack(length))
    # The largest allowed length is accepted, and the reader waits for the rest.
    assert FrameReader(frames.REQUEST, Request).feed(LENGTH.pack(12 + MAX_MESSAGE_BYTES)) == []


@pytest.mark.parametrize(("timeout_s", "deadline_ms"), [(-1.0, 1), (0.0001, 1), (1e12, 2**32 - 1)])
def test_deadlines_fit_their_field(timeout_s: float, deadline_ms: int) -> None:
    (request,) = FrameReader(frames.REQUEST, Request).feed(frames.request(1, 0, timeout_s, b""))
    assert request.deadline_ms == deadline_ms


METHODS = ("/m.S/A", "/m.S/B")
A, B = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES


@pytest.mark.parametrize("at", [5, -1], ids=["its proof", "its methods"])
def test_server_without_the_token_is_refused(at: int) -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    welcome = bytearray(server.receive(client.receive(server.receive(client.hello))))
    welcome[at] ^= 1
    with pytest.raises(Unauthenticated, match="does not know"):
        advance(client, welcome)


def test_proof_is_invalid_with_another_nonce() -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    proof = client.receive(server.receive(client.hello))
    other = Responder("t", METHODS, b"c" * NONCE_BYTES)
    other.receive(client.hello)
    other.receive(proof)
    assert isinstance(other.refusal, Unauthenticated)


def test_other_version_is_incompatible_on_both_sides() -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    hello = bytearray(client.hello)
    hello[8] += 1
    challenge = server.receive(bytes(hello))
    assert isinstance(server.refusal, Incompatible)
    with pytest.raises(Incompatible):
        client.receive(challenge)


@given(st.binary(min_size=200, max_size=400))
def test_garbage_never_completes_a_handshake(garbage: bytes) -> None:
    server = Responder("t", METHODS, B)
    advance(server, bytearray(garbage))
    assert server.refusal is not None
    with pytest.raises((MalformedFrame, MoonserveError)):
        advance(Initiator("t", A), bytearray(garbage))
