"""What an engine tells a conductor of the bandwidths that it saw and can measure. Knows no membership."""

from __future__ import annotations

import time
from collections.abc import Iterator

from protocol.pb import conductor_pb2, metrics_pb2
from transfer.stats import Incident, TransferStats

_COPIED_BYTES = 8 << 20
"""More than a core's caches hold, and a few milliseconds."""
_COPIES = 3


def traffic(stats: TransferStats) -> Iterator[conductor_pb2.Traffic]:
    """Totals by peer, of those with which anything was measured; a peer's name is its instance id."""
    for peer, seen in stats.seen().items():
        if seen.read_bytes or seen.written_bytes:
            yield conductor_pb2.Traffic(
                peer=peer,
                read_bytes=seen.read_bytes,
                read_s=seen.read_s,
                written_bytes=seen.written_bytes,
                written_s=seen.written_s,
            )


def rails(stats: TransferStats) -> Iterator[metrics_pb2.Rail]:
    """Totals by transport and rail, of all peers together."""
    by_rail: dict[tuple[str, str], metrics_pb2.Rail] = {}
    for path in stats:
        key = path.transport, path.rail
        rail = by_rail.setdefault(key, metrics_pb2.Rail(transport=key[0], rail=key[1]))
        rail.read_bytes += path.read_bytes
        rail.written_bytes += path.written_bytes
        rail.failures += path.incidents[Incident.FAILURE]
        rail.retries += path.incidents[Incident.RETRY]
        rail.bytes_in_flight += path.bytes_in_flight
    yield from by_rail.values()


def local_bytes_per_s(memory: memoryview) -> float:
    """How fast this process copies out of memory that it has; within a host a transfer is one such copy. The fastest
    of a few, since whatever disturbs makes it slower."""
    nbytes = min(len(memory), _COPIED_BYTES)
    here = bytearray(nbytes)  # its pages are there before they are timed
    taken_s = [_copied_s(memory[:nbytes], here) for _ in range(_COPIES)]
    return nbytes / max(min(taken_s), 1e-9)


def local_bytes_per_s_beside(nbytes: int) -> float:
    """As `local_bytes_per_s`, of a process that would make pages of elastic memory resident by reading it."""
    return local_bytes_per_s(memoryview(bytearray(b"\1") * min(nbytes, _COPIED_BYTES)))


def _copied_s(source: memoryview, target: bytearray) -> float:
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began
