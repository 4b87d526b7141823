"""A transfer engine in a process of its own, told what to do by JSON lines on stdin.

Each command is answered by one JSON line; `write_until_refused` answers twice: started, refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.errors import MoonserveError
from tests.patience import PATIENCE_S
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from transfer.tcp import acceptor


class PeerProcess:
    def __init__(
        self, token: str, transports: list[str], rails: list[str], tls_files: list[str]
    ) -> None:
        options = TransferOptions(transports=tuple(transports), rails=tuple(rails))
        if tls_files:
            certificate, key, authority = map(Path, tls_files)
            options = replace(
                options, tls_certificate=certificate, tls_key=key, tls_authority=authority
            )
        self.engine = TransferEngine(cluster_token=token, options=options)
        self.engine.start()
        self.segments: dict[int, Segment] = {}

    def address(self) -> str:
        return self.engine.address

    def allocate(self, nbytes: int, fill: int, readable: bool) -> int:
        segment = self.engine.allocate(nbytes, readable=readable)
        segment.buffer[:] = bytes([fill]) * nbytes
        self.segments[segment.segment_id] = segment
        return segment.segment_id

    def open_window(self, segment_id: int, ranges: list[tuple[int, int]]) -> int:
        return self.engine.open_window(self.segments[segment_id], ranges)

    def close_window(self, window_id: int) -> None:
        self.engine.close_window(window_id)

    def content(self, segment_id: int) -> str:
        return bytes(self.segments[segment_id].buffer).hex()

    def write_until_refused(self, address: str, segment_id: int, window_id: int, size: int) -> str:
        """Writes ever new content into the peer's window; the code of the error that ends it."""
        source = self.engine.allocate(size)
        remote = RemoteSegment(address, segment_id)
        for round_number in range(1_000_000):
            source.buffer[:] = bytes([round_number % 251]) * size
            transfer = Transfer(Op.WRITE, source, 0, remote, 0, size, window_id)
            try:
                self.engine.submit([transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)
            except MoonserveError as error:
                return error.code
            if round_number == 1:
                say("started")
        return "never refused"


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    token, transports, rails, *tls_files = sys.argv[1:]
    peer = PeerProcess(
        token, transports.split(","), [rail for rail in rails.split(",") if rail], tls_files
    )
    acceptor._HANDSHAKE_S = PATIENCE_S  # a busy machine is no stranger
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        say(getattr(peer, command)(*arguments))
    peer.engine.close()


if __name__ == "__main__":
    main()
