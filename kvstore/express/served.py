"""One express connection at its node: a question at a time, answered from and into the node's memory.

Runs in a thread of its own. Gets read the published index as any other process does, so they ask nobody, and where
there is a compiler not even the interpreter (`answering`); puts are `storing`. Its rule: a peer that is slow costs its
own thread, for a bounded time. What a get sends may be replaced meanwhile: the reader's checksum tells.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

from kvstore.express import frames
from kvstore.express.frames import ANSWER, QUESTION, Kind, MalformedQuestion, Status, Words
from kvstore.express.link import Link, received
from kvstore.express.storing import Storing
from kvstore.native import answering
from kvstore.native.answering import Desk, End
from kvstore.native.layout import Retired
from kvstore.native.published import PublishedIndex
from kvstore.native.reader import MappedReader
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.keys import KEY_BYTES
from transfer import Segment
from transfer.native import IoVectors, address_of

MOST_S = 30.0
"""For one question, however long its asker would wait: a thread and, while writing, memory depend on it."""
IDLE_S = 300.0


class Served:
    """Any number of connections: `serve` is called for each, in a thread of its own."""

    def __init__(self, index: PublishedIndex, segment: Segment, storing: Storing) -> None:
        self._index = index
        self._memory = segment.buffer
        self._storing = storing
        self._reader = MappedReader(index.memory, segment.buffer)

    def serve(self, link: Link) -> None:
        """Until it ends, which raises PeerLost, or DeadlineExceeded for a peer that was slow or idle."""
        desk = self._desk(link)
        while True:
            if desk is None:
                head = bytes(received(link, QUESTION.size, time.monotonic() + IDLE_S))
            else:
                head = self._gets_answered(desk)
            kind, pin, tenant_bytes, count, deadline_ms, _, nbytes = QUESTION.unpack(head)
            if count > frames.MAX_KEYS or nbytes > frames.MAX_BYTES:
                raise MalformedQuestion("a question that is too large")
            give_up_at = time.monotonic() + min(deadline_ms / 1000, MOST_S)
            if kind == Kind.GET:
                self._get(link, count, nbytes, give_up_at)
            elif kind == Kind.PUT:
                self._storing.put(link, count, nbytes, pin, tenant_bytes, give_up_at)
            else:
                raise MalformedQuestion(f"a question of kind {kind}")

    def _desk(self, link: Link) -> Desk | None:
        """None without a compiler: then gets are answered here."""
        answer_gets, lookups = answering.library(), self._reader.native
        if answer_gets is None or lookups is None:
            return None
        desk = Desk(
            answer_gets,
            link.fileno(),
            most_bytes=frames.MAX_BYTES,
            most_s=MOST_S,
            idle_s=IDLE_S,
            spin_ns=link.spin_ns,
        )
        desk.use(lookups)
        return desk

    def _gets_answered(self, desk: Desk) -> bytes:
        """The head of the next question that is no get, or a large one."""
        while (end := desk.answer()) is not End.OTHER:
            if end is End.LATE:
                raise DeadlineExceeded("the peer was slow or idle")
            if end is End.HANGUP:
                raise PeerLost("the connection broke")
            with contextlib.suppress(Retired):  # it grows again: then the desk will say so
                self._reader = MappedReader(self._index.memory, self._memory)
            if self._reader.native is not None:
                desk.use(self._reader.native)
        return desk.take_head()

    def _get(self, link: Link, count: int, budget: int, give_up_at: float) -> None:
        body = received(link, count * (KEY_BYTES + 8), give_up_at)
        rooms = np.frombuffer(body, np.uint64, count, count * KEY_BYTES)
        answer = frames.answer_room(count)
        ANSWER.pack_into(answer, 0, Status.OK, count, count * frames.ROW_BYTES)
        pieces: IoVectors = np.empty((count + 1, 2), np.uint64)
        pieces[0, 0], pieces[0, 1] = address_of(answer), len(answer)
        keys = bytes(body[: count * KEY_BYTES])
        num_pieces = self._located(keys, rooms, budget, frames.rows_in(answer, count), pieces[1:])
        link.send(pieces[: num_pieces + 1])
        link.pump(give_up_at)

    def _located(
        self, keys: bytes, rooms: Words, budget: int, rows: Words, pieces: IoVectors
    ) -> int:
        while True:
            try:
                return self._reader.locate(keys, rooms, budget, rows, pieces)
            except Retired:  # the index has grown
                self._reader = MappedReader(self._index.memory, self._memory)
