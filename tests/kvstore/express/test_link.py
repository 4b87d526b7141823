"""Checksums of values that arrive in pieces of any size, over a real socket."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.express.link import PIECE_BYTES, Link, checksums_on_arrival
from protocol.checksum import checksum
from protocol.errors import DeadlineExceeded, PeerLost
from tests.thoroughness import examples
from transfer.native import address_of, vectors

MOST_PIECES = 500  # a byte at a time only where there are few
SIZES = st.integers(0, 5_000) | st.just(PIECE_BYTES) | st.integers(130_000, 400_000)


def landed(memory: bytearray, lengths: list[int], link: Link) -> list[memoryview]:
    """Places back to back that `link` receives into."""
    link.receive(vectors((address_of(memory), sum(lengths))), 0)
    ends = np.cumsum(lengths).tolist()
    view = memoryview(memory)
    return [view[end - n : end] for end, n in zip(ends, lengths, strict=True)]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=8), st.integers(1, 300_000))
def test_each_value_has_its_own_checksum_however_it_was_cut(values: list[tuple[int, bool]], piece: int) -> None:
    """Those that nobody wants are passed over: 0."""
    lengths = [length for length, _ in values]
    data = np.random.default_rng(piece).bytes(sum(lengths))
    piece = max(piece, len(data) // MOST_PIECES)
    near, far = socket.socketpair()

    def dribble() -> None:
        for at in range(0, len(data), piece):
            far.sendall(data[at : at + piece])

    sender = threading.Thread(target=dribble)
    link = Link(near)
    sender.start()
    try:
        memory = bytearray(max(1, len(data)))
        places = landed(memory, lengths, link)
        wanted = [place if is_wanted else None for place, (_, is_wanted) in zip(places, values, strict=True)]
        found = checksums_on_arrival(link, wanted, lengths, time.monotonic() + 30.0)
    finally:
        sender.join()
        link.close()
        far.close()
    assert bytes(memory[: len(data)]) == data
    expected = [0 if place is None else checksum([place]) for place in wanted]
    assert found == expected


def test_a_peer_that_ends_in_the_midst_is_lost_and_one_that_stops_is_too_late() -> None:
    near, far = socket.socketpair()
    link = Link(near)
    far.sendall(b"half")
    places = landed(bytearray(8), [8], link)
    with pytest.raises(DeadlineExceeded):
        checksums_on_arrival(link, places, [8], time.monotonic() + 0.05)
    far.close()
    with pytest.raises(PeerLost):
        checksums_on_arrival(link, places, [8], time.monotonic() + 30.0)
    link.close()
