"""Process with the memory into which a decode worker would receive a handoff, and nothing else.

The benchmark's prefill worker hands KV off to it over shm, as to a decode worker on the same host.
`python -m benchmarks.engine.overlap_sink TOKEN BYTES` prints the target of writes and runs until its standard input
ends.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from prefill_worker import events as ev
from prefill_worker.actions import CommitHandoff, ReserveLanding
from prefill_worker.landing_client import LandingClient
from protocol.ids import LeaseId
from protocol.request import Endpoint
from protocol.rpc import Channels
from transfer import TransferEngine


@dataclass(frozen=True, slots=True)
class Sink:
    """Target of handoffs: a window of a segment in another process."""

    address: str
    segment_id: int
    window_id: int
    num_blocks: int


class SinkLandings(LandingClient):
    """Landing client that grants every reservation in the sink, one at a time, and accepts every commit."""

    def __init__(self, channels: Channels, sink: Sink) -> None:
        super().__init__(channels, fingerprint="", ttl_s=600.0)
        self._sink = sink

    async def reserve(self, action: ReserveLanding) -> ev.Landing:
        return ev.Landing(
            lease_id=action.lease_id,
            block_ids=tuple(range(self._sink.num_blocks)),
            num_cached_blocks=0,
            transfer_address=self._sink.address,
            segment_id=self._sink.segment_id,
            window_id=self._sink.window_id,
            num_blocks=self._sink.num_blocks,
            ttl_s=600.0,
        )

    async def renew(self, decode: Endpoint, lease_id: LeaseId) -> None: ...

    async def commit(self, action: CommitHandoff) -> tuple[int, ...]:
        return ()

    async def release(self, decode: Endpoint, lease_id: LeaseId) -> None: ...


def main(token: str, nbytes: int) -> None:
    with TransferEngine(cluster_token=token) as transfer:
        segment = transfer.allocate(nbytes)
        window_id = transfer.open_window(segment, [(0, nbytes)])
        print(json.dumps([transfer.address, segment.segment_id, window_id]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
