"""Forks a process with a transfer engine for each line on stdin: cheap peers, meant to be killed.

Itself without threads, so that forking is safe. Each child says who and where it is in one line of JSON,
then serves until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from transfer import TransferEngine, TransferOptions

NBYTES = 1 << 20


def serve(token: str, transport: str) -> None:
    engine = TransferEngine(cluster_token=token, options=TransferOptions(transports=(transport,)))
    engine.start()
    segment = engine.allocate(NBYTES, readable=True)
    window_id = engine.open_window(segment, [(0, NBYTES)])
    line = json.dumps([os.getpid(), engine.address, segment.segment_id, window_id])
    os.write(sys.stdout.fileno(), f"{line}\n".encode())
    while True:
        signal.pause()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if os.fork() == 0:
            serve(sys.argv[1], line.strip())


if __name__ == "__main__":
    main()
