"""Who comes in by the door of a node, and who does not."""

from __future__ import annotations

import socket
import threading

import pytest

from kvstore.express.link import Link
from kvstore.express.service import ExpressConnections


def serve(link: Link) -> None:
    raise AssertionError("nobody was let in")


def test_a_connection_for_which_there_is_no_thread_is_closed_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    door = ExpressConnections(serve, max_connections=1)
    ours, theirs = socket.socketpair()
    with theirs:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            door.take(ours)
        assert theirs.recv(1) == b""
        door.admit()
        door.close()
