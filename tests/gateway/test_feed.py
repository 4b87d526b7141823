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
def test_handed_over_or_waiting_pieces_keep_their_order(accepts: list[bool], pauses: list[bool]) -> None:
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


async def test_only_what_waits_counts_as_unread() -> None:
    feed, seen = Feed(2), list[str]()
    assert [feed.put(piece("x")) for _ in range(3)] == [True, True, False]
    feed = Feed(2)
    reading = asyncio.create_task(read(feed, [], seen))
    await asyncio.sleep(0)
    assert all(feed.put(piece("x")) for _ in range(10))
    assert feed.put(piece("end", is_last=True))
    await reading
    assert seen == [*"xxxxxxxxxx", "end"]


async def test_an_error_comes_instead_of_what_was_not_read() -> None:
    """And a reader that was cancelled is handed nothing."""
    feed, seen = Feed(100), list[str]()
    reading = asyncio.create_task(read(feed, [], seen))
    await asyncio.sleep(0)
    feed.put(piece("a"))
    feed.fail(ValueError("over"))
    feed.put(piece("b"))
    with pytest.raises(ValueError, match="over"):
        await reading
    feed = Feed(100)
    reading = asyncio.create_task(read(feed, [], seen))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    feed.put(piece("c"))
    assert seen == ["a"]
