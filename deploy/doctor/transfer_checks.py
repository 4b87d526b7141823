"""Checks of transports and rails for `moonserve doctor`, by transfers between two engines in this process.

A transport counts as usable only if bytes went both ways over it and arrived unchanged.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from deploy.doctor.findings import Finding
from deploy.terminal.output import rate
from protocol.errors import ConfigError, MoonserveError
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import Rail
from transfer.paths.discovery import (
    local_tcp_rails,
    reachable_addresses,
    read_addresses,
    read_topology,
)
from transfer.rdma.device import Port, discover

TRANSPORTS = ("shm", "rdma", "tcp")

_DEADLINE_S = 3.0
_PROBE_BYTES = 64 << 10
_MOST_BYTES = 32 << 20
_MEASURE_S = 0.4
_NUM_LATENCIES = 100


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of transfers between two engines over one transport."""

    transport: str
    error: str = ""
    """Reason why the transport cannot be used; empty if it can."""
    read_bytes_s: float | None = None
    latency_s: float | None = None
    """Median time of a single READ of 64 KiB."""


def check_transports(options: TransferOptions, *, measure: bool) -> Iterator[Finding]:
    """Yields one finding per transport; those in `options` must work. Raises ConfigError if one of them is unknown."""
    unknown = [name for name in options.transports if name not in TRANSPORTS]
    if unknown:
        raise ConfigError(f"--transports {unknown[0]}: choose from {', '.join(TRANSPORTS)}")
    if measure:
        yield _memcpy()
    for transport in TRANSPORTS:
        trial = try_transport(transport, options, measure=measure)
        yield _outcome(trial, asked=transport in options.transports)


def check_rails(options: TransferOptions) -> list[Finding]:
    """Returns findings for the rails that these options use, for the unused ones, and for preferences by memory."""
    try:
        rails = _rails(options)
    except ConfigError as error:
        remedy = "see --transfer-rails and --host"
        return [Finding("rails", "rails", error.message, remedy, fails=True)]
    findings = [_rail(rail, used=True) for rail in rails]
    findings += [_rail(rail, used=False) for rail in _unused(rails)]
    for location, preference in read_topology(rails).matrix.items():
        text = f"prefers {', '.join(preference.preferred) or 'nothing'}"
        if preference.secondary:
            text += f"; then {', '.join(preference.secondary)}"
        findings.append(Finding("topology", location, text))
    return findings


def try_transport(transport: str, options: TransferOptions, *, measure: bool) -> Trial:
    """Moves bytes there and back over only this transport. With `measure`, also measures rate and latency."""
    options = replace(options, transports=(transport,))
    token = secrets.token_hex(16)
    try:
        with (
            TransferEngine(cluster_token=token, options=options, name="near") as near,
            TransferEngine(cluster_token=token, options=options, name="far") as far,
        ):
            pair = _Pair(near, far, _MOST_BYTES if measure else 2 * _PROBE_BYTES)
            pair.verify()
            if not measure:
                return Trial(transport)
            return Trial(transport, "", pair.read_bytes_s(), pair.latency_s())
    except ImportError as error:
        return Trial(transport, f"not installed ({error}): pip install 'moonserve[{transport}]'")
    except MoonserveError as error:
        return Trial(transport, error.message)


class _Pair:
    """Memory at both ends of a trial, and transfers between them."""

    def __init__(self, near: TransferEngine, far: TransferEngine, nbytes: int) -> None:
        self._near, self._far = near, far
        self._local = near.allocate(nbytes)
        self._memory = far.allocate(nbytes, readable=True)

    def verify(self) -> None:
        """Does a WRITE and a READ back. Raises MoonserveError if one fails or the bytes differ."""
        sent = secrets.token_bytes(_PROBE_BYTES)
        self._local.buffer[:_PROBE_BYTES] = sent
        window_id = self._far.open_window(self._memory, [(0, _PROBE_BYTES)])
        self._move(Op.WRITE, 0, 0, _PROBE_BYTES, window_id)
        self._far.close_window(window_id)
        self._move(Op.READ, _PROBE_BYTES, 0, _PROBE_BYTES)
        arrived = bytes(self._local.buffer[_PROBE_BYTES : 2 * _PROBE_BYTES])
        if arrived != sent or bytes(self._memory.buffer[:_PROBE_BYTES]) != sent:
            raise MoonserveError("bytes arrived changed: do not use this transport")

    def read_bytes_s(self) -> float:
        """Returns the best rate of READs within `_MEASURE_S`. The size doubles while reads take under 1/16 of it."""
        nbytes, best, ends_at = 1 << 20, 0.0, time.monotonic() + _MEASURE_S
        while time.monotonic() < ends_at:
            seconds = _timed(lambda: self._move(Op.READ, 0, 0, nbytes))  # noqa: B023 - called at once
            best = max(best, nbytes / seconds)
            if seconds < _MEASURE_S / 16:
                nbytes = min(2 * nbytes, _MOST_BYTES)
        return best

    def latency_s(self) -> float:
        ends_at, taken = time.monotonic() + _MEASURE_S / 2, list[float]()
        while len(taken) < _NUM_LATENCIES and (not taken or time.monotonic() < ends_at):
            taken.append(_timed(lambda: self._move(Op.READ, 0, 0, _PROBE_BYTES)))
        return median(taken)

    def _move(self, op: Op, to: int, start: int, nbytes: int, window_id: int | None = None) -> None:
        local, remote = (to, start) if op is Op.READ else (start, to)
        target = RemoteSegment(self._far.address, self._memory.segment_id)
        transfer = Transfer(op, self._local, local, target, remote, nbytes, window_id)
        self._near.run([transfer], deadline_s=_DEADLINE_S)


def _outcome(trial: Trial, *, asked: bool) -> Finding:
    subject = trial.transport
    if trial.error and not asked:
        return Finding("transports", subject, f"none, and not asked for: {trial.error}")
    if trial.error:
        remedy = f"repair it, or leave {subject} out of --transports"
        return Finding("transports", subject, trial.error, remedy, fails=True)
    text = "bytes went both ways and were right"
    if trial.read_bytes_s is not None and trial.latency_s is not None:
        text += f"; READ {rate(trial.read_bytes_s)}, 64 KiB in {trial.latency_s * 1e6:.0f} µs"
        text += " (both ends in this process)"
    return Finding("transports", subject, text)


def _memcpy() -> Finding:
    """Returns the rate of a copy within memory, an upper bound for transports within this host."""
    source, target = np.ones(_MOST_BYTES, np.uint8), np.empty(_MOST_BYTES, np.uint8)
    bytes_s = _MOST_BYTES / min(_timed(lambda: np.copyto(target, source)) for _ in range(5))
    text = f"{rate(bytes_s)}: the limit of any transport within this host"
    return Finding("transports", "memory copy", text)


def _rails(options: TransferOptions) -> list[Rail]:
    """Returns the rails that the transports will use, in their order. Raises ConfigError."""
    rails: list[Rail] = []
    for transport in options.transports:
        if transport == "tcp":
            rails += local_tcp_rails(options.tcp_rails or (options.host,))
        elif transport == "rdma":
            ports = [port for port in discover() if port.usable]
            wanted = options.rdma_rails or [port.name for port in ports]
            rails += [_rdma_rail(port) for port in ports if {port.name, port.device} & {*wanted}]
    return rails


def _unused(rails: Sequence[Rail]) -> list[Rail]:
    """Returns the other rails that `--transfer-rails` could name."""
    hosts = reachable_addresses(read_addresses())
    others = local_tcp_rails(hosts) + [_rdma_rail(port) for port in discover() if port.usable]
    taken = {(rail.transport, rail.endpoint or rail.name) for rail in rails}
    return [rail for rail in others if (rail.transport, rail.endpoint or rail.name) not in taken]


def _rdma_rail(port: Port) -> Rail:
    return Rail("rdma", port.name, "", port.numa_node, port.bandwidth_bytes_s)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _rail(rail: Rail, *, used: bool) -> Finding:
    parts = [rail.endpoint or "RDMA port"]
    if rail.bandwidth_bytes_s:
        parts.append(f"{rail.bandwidth_bytes_s * 8e-9:g} Gbit/s")
    if rail.numa_node is not None:
        parts.append(f"NUMA node {rail.numa_node}")
    if not used:
        parts.append("not used with these options")
    return Finding("rails", rail.name, ", ".join(parts))
