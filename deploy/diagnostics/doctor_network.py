"""Checks of the network for `moonserve doctor`: transports and rails of this machine, and the reachability of a peer.

A transport counts as usable only if bytes went both ways over it, between two engines in this process, and arrived
unchanged. For `--peer`, each endpoint is checked, then the handshake. Every wait has a timeout of a few seconds.
"""

import errno
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from moonserve.deploy.diagnostics.doctor_findings import Finding, Severity
from moonserve.deploy.terminal import rate
from moonserve.protocol.errors import ConfigError, Incompatible, MoonserveError, Unauthenticated
from moonserve.protocol.process.machine import boot_id
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.paths.hardware_discovery import (
    local_tcp_rails,
    owner_of,
    reachable_addresses,
    read_addresses,
    read_topology,
)
from moonserve.transfer.paths.peer_address import Address, Rail, parse_address
from moonserve.transfer.rdma.device import Port, discover_ports

TRANSPORTS = ("shm", "rdma", "tcp")

_DEADLINE_S = 3.0
_PROBE_BYTES = 64 << 10
_MOST_BYTES = 32 << 20
_MEASURE_S = 0.4
_NUM_LATENCIES = 100


@dataclass(frozen=True, slots=True)
class TransportResult:
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


def try_transport(transport: str, options: TransferOptions, *, measure: bool) -> TransportResult:
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
                return TransportResult(transport)
            return TransportResult(transport, "", pair.read_bytes_s(), pair.latency_s())
    except ImportError as error:
        return TransportResult(transport, f"not installed ({error}): pip install 'moonserve[{transport}]'")
    except MoonserveError as error:
        return TransportResult(transport, error.message)


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


def _outcome(trial: TransportResult, *, asked: bool) -> Finding:
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
            ports = [port for port in discover_ports() if port.usable]
            wanted = options.rdma_rails or [port.name for port in ports]
            rails += [_rdma_rail(port) for port in ports if {port.name, port.device} & {*wanted}]
    return rails


def _unused(rails: Sequence[Rail]) -> list[Rail]:
    """Returns the other rails that `--transfer-rails` could name."""
    hosts = reachable_addresses(read_addresses())
    others = local_tcp_rails(hosts) + [_rdma_rail(port) for port in discover_ports() if port.usable]
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


# -- reachability of a peer

SECTION = "peer"

_CONNECT_S = 1.5
_HANDSHAKE_S = 3.0
_HOST_AND_PORT = re.compile(r"\[?(?P<host>[^\]@;,]+)\]?:(?P<port>\d{1,5})")

_WHY = {
    errno.ECONNREFUSED: (
        "refused",
        "nothing listens there: an address ends with its process, ask for the current one",
    ),
    errno.ETIMEDOUT: (
        f"no answer within {_CONNECT_S:g} s",
        "a firewall drops it, or the peer advertises an address that is not routed from here (--host there)",
    ),
    errno.EHOSTUNREACH: ("no such host on that network", "is the peer up, and the address right?"),
    errno.ENETUNREACH: ("no route to that network", "name a reachable address with --host there"),
    errno.EINVAL: ("cannot be dialled", "the peer advertises an address that only it can use"),
}
_SAME_VERSION = "run the same version of moonserve at both ends"


def check_peer(text: str, options: TransferOptions, cluster_token: str) -> Iterator[Finding]:
    """Yields the findings for a peer. `text`: address published by a transfer engine ("ms2;…"), or host:port."""
    if _HOST_AND_PORT.fullmatch(text):
        yield _dial_tcp("tcp", Rail("tcp", text, text))
        return
    try:
        address = parse_address(text)
    except MoonserveError as error:
        remedy = "give host:port, or the whole address as the peer logged it, in quotes"
        remedy = _SAME_VERSION if isinstance(error, Incompatible) else remedy
        yield Finding(SECTION, "address", error.message, remedy, fails=True)
        return
    reached: set[str] = set()
    for transport, rails in address.rails.items():
        for rail in rails:
            finding = _dial_shm(address, rail) if transport == "shm" else _dial_tcp(transport, rail)
            if finding.state is Severity.OK:
                reached.add(transport)
            yield replace(finding, fails=finding.fails and transport in options.transports)
    if not cluster_token:
        remedy = "set MOONSERVE_CLUSTER_TOKEN to the cluster's"
        yield Finding(SECTION, "handshake", "not tried without a cluster token", remedy)
        return
    for transport in options.transports:
        if transport in reached:
            yield _handshake(text, address, transport, options, cluster_token)


def _dial_shm(address: Address, rail: Rail) -> Finding:
    if address.host != boot_id():
        text = "only within a machine, and the peer runs under another kernel"
        return Finding(SECTION, "shm", text)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect("\0" + rail.endpoint)
        except OSError as error:
            remedy = (
                "has it ended, or does it run in another container (network namespace)? "
                "there, leave shm out of --transports"
            )
            text = f"{rail.endpoint}: {error.strerror or error}"
            return Finding(SECTION, "shm", text, remedy, fails=True)
    return Finding(SECTION, "shm", f"{rail.endpoint}: reached on this host")


def _dial_tcp(transport: str, rail: Rail) -> Finding:
    """Connects to a rail over TCP. An rdma rail has a TCP connection in addition to its queue pairs."""
    subject = f"{transport} {rail.name}" if rail.name != rail.endpoint else transport
    host, _, port = rail.endpoint.rpartition(":")
    began = time.perf_counter()
    try:
        if not 0 < int(port) < 65536:  # the resolver would take it modulo 65536
            raise ValueError(f"there is no port {port}")
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as sock:
            seconds = time.perf_counter() - began
            source = sock.getsockname()[0]
    except (OSError, ValueError) as error:
        return unreachable_finding(subject, rail.endpoint, error)
    interface = owner_of(source, read_addresses()) or "an unknown interface"
    text = f"{rail.endpoint}: reached from {source} on {interface} in {seconds * 1e3:.1f} ms"
    return Finding(SECTION, subject, text)


def unreachable_finding(subject: str, endpoint: str, error: Exception) -> Finding:
    """Returns the finding for a failed connection, with a reason and a remedy for its error."""
    code = errno.ETIMEDOUT if isinstance(error, TimeoutError) else getattr(error, "errno", None)
    unknown = (str(error), "is the host name right, and the port below 65536?")
    text, remedy = _WHY.get(code or 0, unknown)
    return Finding(SECTION, subject, f"{endpoint}: {text}", remedy, fails=True)


def _handshake(text: str, address: Address, transport: str, options: TransferOptions, cluster_token: str) -> Finding:
    subject = f"{transport} handshake"
    source = _source_towards(address) if not options.rails else None
    options = replace(options, transports=(transport,), host=source or options.host)
    try:
        with TransferEngine(cluster_token=cluster_token, options=options, name="doctor") as engine:
            segments = engine.open(text, deadline_s=_HANDSHAKE_S)
    except MoonserveError as error:
        remedy = "see the peer's log"
        if isinstance(error, Unauthenticated):
            remedy = "MOONSERVE_CLUSTER_TOKEN differs between here and there"
        elif isinstance(error, Incompatible):
            remedy = _SAME_VERSION
        return Finding(SECTION, subject, error.message, remedy, fails=True)
    listed = f"{len(segments)} readable segments" if len(segments) != 1 else "1 readable segment"
    return Finding(SECTION, subject, f"authenticated; {listed}")


def _source_towards(address: Address) -> str | None:
    """Returns the source address of the route to the peer's first routable TCP rail, or None. Sends nothing."""
    for rail in address.rails.get("tcp", ()):
        host = rail.endpoint.rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((host, 9))
            except OSError:
                continue
            return str(sock.getsockname()[0])
    return None
