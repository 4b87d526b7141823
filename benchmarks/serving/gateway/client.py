"""Client process of the gateway benchmark, which reads many streams with as little work as possible.

`python -m benchmarks.serving.gateway.client PORT STREAMS TEXT` opens streams and prints a line of JSON when all have
ended: the arrival times (time.monotonic) of each token's TEXT by stream, and the number of events. A line on standard
input ends it early. It reads bytes and does not parse HTTP: a token is an occurrence of TEXT, an event an occurrence of
`data: {`.
"""

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

_EVENT = b"data: {"
_END = b"data: [DONE]"


class StreamReader(asyncio.Protocol):
    """Reads one streamed completion."""

    def __init__(self, request: bytes, text: bytes) -> None:
        self._request, self._text = request, text
        self._tail = b""  # end of the bytes so far, shorter than `_END`
        self.arrived_at: list[float] = []
        self.num_events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data, before = self._tail + data, self._tail
        count = data.count(self._text) - before.count(self._text)
        if count:
            self.arrived_at += [now] * count
        self.num_events += data.count(_EVENT) - before.count(_EVENT)
        if _END in data:
            self._finish()
        self._tail = data[1 - len(_END) :]

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(port: int, max_tokens: int) -> bytes:
    """Returns the HTTP request of a streamed completion with a short prompt."""
    body = json.dumps({"prompt": [92, 92], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read(port: int, num_streams: int, text: str) -> None:
    """Opens the streams, reads them to their end, and prints the arrival times and the number of events."""
    loop = asyncio.get_running_loop()
    request, readers = request_bytes(port, 500_000), []
    for _ in range(num_streams):
        _, reader = await loop.create_connection(lambda: StreamReader(request, text.encode()), "127.0.0.1", port)
        readers.append(reader)
    stopped = loop.run_in_executor(None, sys.stdin.readline)
    everything = asyncio.gather(*(reader.done for reader in readers))
    await asyncio.wait([everything, stopped], return_when=asyncio.FIRST_COMPLETED)
    seen = {
        "arrived_at": [reader.arrived_at for reader in readers],
        "num_events": sum(reader.num_events for reader in readers),
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    uvloop.run(read(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
