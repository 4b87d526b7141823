"""Transfer engines in processes of their own, which can be stopped and killed and are controlled through a pipe.

They are forked from a process that has imported everything and runs no thread, so each start takes milliseconds.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from moonserve.protocol.errors import MoonserveError
from moonserve.transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.tcp import target
from tests.patience import PATIENCE_S
from tests.stopping import stop

TOKEN = "token of the test cluster"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


class PeerInProcess:
    """A transfer engine in another process. `ask` calls a method of `_Peer` there."""

    def __init__(self, *transports: str, **options: Any) -> None:
        self._pipe, theirs = FORKS.Pipe()
        options["transports"] = transports
        self.process = FORKS.Process(target=_serve, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()

    def lend(self, nbytes: int, fill: int = 0) -> tuple[RemoteSegment, int]:
        """Allocates a readable segment in the peer and opens a window over all of it."""
        segment_id, window_id = self.ask("lend", nbytes, fill)
        return RemoteSegment(self.ask("address"), segment_id), window_id

    def content(self, segment: RemoteSegment) -> bytes:
        found: bytes = self.ask("content", segment.segment_id)
        return found

    def stop(self) -> None:
        assert self.process.pid is not None
        stop(self.process.pid)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class _Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        self.engine = TransferEngine(cluster_token=TOKEN, options=TransferOptions(**options))
        self.engine.start()
        self.segments: dict[int, Segment] = {}
        self.refusals: SimpleQueue[str] = SimpleQueue()

    def address(self) -> str:
        return self.engine.address

    def lend(self, nbytes: int, fill: int) -> tuple[int, int]:
        segment = self.engine.allocate(nbytes, readable=True)
        segment.buffer[:] = bytes([fill]) * nbytes
        self.segments[segment.segment_id] = segment
        return segment.segment_id, self.engine.open_window(segment, [(0, nbytes)])

    def write_until_refused(self, remote: RemoteSegment, window_id: int, nbytes: int) -> None:
        """Starts to write all of the window, again and again."""
        local = self.engine.allocate(nbytes)
        local.buffer[:] = b"w" * nbytes
        transfer = Transfer(Op.WRITE, local, 0, remote, 0, nbytes, window_id)

        def write() -> None:
            try:
                while True:
                    self.engine.run([transfer], deadline_s=PATIENCE_S)
            except MoonserveError as error:
                self.refusals.put(type(error).__name__)

        threading.Thread(target=write, daemon=True).start()

    def refusal(self) -> str:
        """Waits until the writer is refused."""
        return self.refusals.get()

    def content(self, segment_id: int) -> bytes:
        return bytes(self.segments[segment_id].buffer)


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    target._HANDSHAKE_S = PATIENCE_S  # on a busy machine a peer may be slow
    peer = _Peer(options)
    while True:
        command, *arguments = pipe.recv()  # raises EOFError when the test process is gone
        pipe.send(getattr(peer, command)(*arguments))
