"""Both ends prove the token, and nobody gets further without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Incompatible, MoonserveError, Unauthenticated
from protocol.lean.frames import MalformedFrame
from protocol.lean.handshake import NONCE_BYTES, Initiator, Responder, advance

METHODS = ("/m.S/A", "/m.S/B")
A, B = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES


def converse(client: Initiator, server: Responder) -> None:
    """Passes messages until both are silent; raises what the client raises."""
    to_server, to_client = bytearray(client.hello), bytearray()
    while to_server or to_client:
        to_client += advance(server, to_server)
        if server.refusal is not None:
            to_server.clear()
        to_server += advance(client, to_client)


def test_equal_tokens_agree_on_the_methods() -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    converse(client, server)
    assert client.methods == METHODS
    assert (client.needed, server.needed, server.refusal) == (0, 0, None)


def test_a_wrong_token_is_told_to_the_client() -> None:
    client, server = Initiator("guess", A), Responder("t", METHODS, B)
    with pytest.raises(Unauthenticated, match="wrong cluster token"):
        converse(client, server)
    assert isinstance(server.refusal, Unauthenticated)


@pytest.mark.parametrize("at", [5, -1], ids=["its proof", "its methods"])
def test_a_server_that_does_not_know_the_token_is_not_believed(at: int) -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    welcome = bytearray(server.receive(client.receive(server.receive(client.hello))))
    welcome[at] ^= 1
    with pytest.raises(Unauthenticated, match="does not know"):
        advance(client, welcome)


def test_a_proof_is_of_no_use_with_another_nonce() -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    proof = client.receive(server.receive(client.hello))
    other = Responder("t", METHODS, b"c" * NONCE_BYTES)
    other.receive(client.hello)
    other.receive(proof)
    assert isinstance(other.refusal, Unauthenticated)


def test_another_version_is_incompatible_on_both_sides() -> None:
    client, server = Initiator("t", A), Responder("t", METHODS, B)
    hello = bytearray(client.hello)
    hello[8] += 1
    challenge = server.receive(bytes(hello))
    assert isinstance(server.refusal, Incompatible)
    with pytest.raises(Incompatible):
        client.receive(challenge)


@given(st.binary(min_size=200, max_size=400))
def test_garbage_never_gets_in_and_a_client_ends_on_it(garbage: bytes) -> None:
    server = Responder("t", METHODS, B)
    advance(server, bytearray(garbage))
    assert server.refusal is not None
    with pytest.raises((MalformedFrame, MoonserveError)):
        advance(Initiator("t", A), bytearray(garbage))
