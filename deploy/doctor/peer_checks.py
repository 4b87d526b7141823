"""Reachability of a peer from this host, for `moonserve doctor --peer`: checks each endpoint, then the handshake.

Every wait has a timeout of a few seconds.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

from deploy.doctor.findings import Finding, State
from protocol.errors import Incompatible, MoonserveError, Unauthenticated
from protocol.machine import boot_id
from transfer import TransferEngine, TransferOptions
from transfer.address import Address, Rail, parse
from transfer.paths.discovery import owner_of, read_addresses

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
        address = parse(text)
    except MoonserveError as error:
        remedy = "give host:port, or the whole address as the peer logged it, in quotes"
        remedy = _SAME_VERSION if isinstance(error, Incompatible) else remedy
        yield Finding(SECTION, "address", error.message, remedy, fails=True)
        return
    reached: set[str] = set()
    for transport, rails in address.rails.items():
        for rail in rails:
            finding = _dial_shm(address, rail) if transport == "shm" else _dial_tcp(transport, rail)
            if finding.state is State.OK:
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
        return unreached(subject, rail.endpoint, error)
    interface = owner_of(source, read_addresses()) or "an unknown interface"
    text = f"{rail.endpoint}: reached from {source} on {interface} in {seconds * 1e3:.1f} ms"
    return Finding(SECTION, subject, text)


def unreached(subject: str, endpoint: str, error: Exception) -> Finding:
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
