"""Pieces on their way to a reply's writer: whole, in order, bounded."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.answer import Feed
from gateway.generation.events import Piece
from protocol.ids import RequestId
from protocol.request import FinishReason, Token

ONE = (Token(request_id=RequestId("r"), index=0, token_id=1),)


def piece(text: str, *, is_last: bool = False) -> Piece:
    reason = FinishReason.LENGTH if is_last else None
    return Piece(index=0, text=text, tokens=ONE, finish_reason=reason)


async def read(feed: Feed, accepts: list[bool], seen: list[str]) -> None:
    """Until the last piece. `accepts`: which of the pieces that are handed over are dealt with at once."""

    def handle(each: Piece) -> bool:
        if accepts and not accepts.pop():
            return False
        seen.append(each.text)
        return True

    while True:
        for each in await feed.take(handle):
            seen.append(each.text)
            if each.finish_reason is not None:
                return


@given(accepts=st.lists(st.booleans()), pauses=st.lists(st.booleans(), min_size=1, max_size=20))
def test_handed_over_or_waiting_pieces_keep_their_order(
    accepts: list[bool], pauses: list[bool]
) -> None:
    async def run() -> None:
        feed, seen = Feed(100), list[str]()
        reading = asyncio.create_task(read(feed, list(accepts), seen))
        for number, pause in enumerate(pauses):
            if pause:
                await asyncio.sleep(0)
            feed.put(piece(f"{number},"))
        feed.put(piece("end", is_last=True))
        await reading
        assert "".join(seen) == "".join(f"{number}," for number in range(len(pauses))) + "end"

    asyncio.run(run())


async def test_what_was_handed_over_does_not_count_as_unread() -> None:
    feed, seen = Feed(2), list[str]()
    reading = asyncio.create_task(read(feed, [], seen))
    await asyncio.sleep(0)
    assert all(feed.put(piece("x")) for _ in range(10))
    assert feed.put(piece("end", is_last=True))
    await reading
    assert seen == [*"xxxxxxxxxx", "end"]


def test_a_reader_that_is_too_far_behind_is_told_of() -> None:
    feed = Feed(2)
    assert [feed.put(piece("x")) for _ in range(3)] == [True, True, False]


async def test_an_error_comes_instead_of_what_was_not_read() -> None:
    feed, seen = Feed(100), list[str]()
    reading = asyncio.create_task(read(feed, [], seen))
    await asyncio.sleep(0)
    feed.put(piece("a"))
    feed.fail(ValueError("over"))
    feed.put(piece("b"))
    with pytest.raises(ValueError, match="over"):
        await reading
    assert seen == ["a"]


async def test_a_reader_that_was_cancelled_is_handed_nothing() -> None:
    feed, seen = Feed(100), list[str]()
    reading = asyncio.create_task(read(feed, [], seen))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    feed.put(piece("a"))
    assert seen == []
