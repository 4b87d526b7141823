"""Builds a store client from a URL. The only module of the client that reads the environment."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from kvstore.client.backstage import Backstage
from kvstore.client.cluster import Cluster
from kvstore.client.deadline import Deadline
from kvstore.client.node import Means
from kvstore.client.store import KvStore
from protocol.errors import ConfigError, PeerLost
from protocol.registry.base import Registry
from protocol.registry.connect import connect as connect_registry
from protocol.rpc import Channels
from protocol.tls import Certificates, TlsFiles, load
from transfer import TransferEngine, TransferOptions

TOKEN_VARIABLE = "MOONSERVE_CLUSTER_TOKEN"
NODE_SCHEME = "node"
_NUM_THREADS = 16
"""Concurrent calls to nodes, over all callers; a further call waits for a thread."""


def connect(
    url: str,
    *,
    cluster_token: str | None = None,
    options: TransferOptions | None = None,
    tls: TlsFiles | None = None,
    timeout_s: float | None = None,
) -> KvStore:
    """Connects to the store of a cluster, found through its registry, or to a single node.

    `url`: `redis://…`, `redis+sentinel://…` or `host:port` of the directory process for a cluster; `node://host:port`
    for a single node. The default token is MOONSERVE_CLUSTER_TOKEN. `tls` is for clusters with `--tls-certificate`; it
    covers KV too, unless `options` are given. Without `timeout_s` the limit is that of any call. Raises ConfigError,
    Unauthenticated, and PeerLost if the registry does not answer in time.
    """
    token = cluster_token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"no cluster token: give cluster_token or set {TOKEN_VARIABLE}")
    certificates = None if tls is None else load(tls)
    means = _means(token, options or default_options(url, tls), certificates)
    cluster = Cluster(means)
    try:
        if url.startswith(f"{NODE_SCHEME}://"):
            cluster.know(_address_of(url))
        else:
            _follow(cluster, means, url, Deadline(timeout_s).left_s())
        return KvStore(cluster, means)
    except BaseException:  # also on interruption: nothing else could close them
        cluster.close()
        means.close()
        raise


def default_options(url: str, tls: TlsFiles | None = None) -> TransferOptions:
    """Returns the default transfer options: transfers use the local address that leads to the registry.

    Slices have no checksums of their own, because the reader or the committing node verifies each object.
    """
    return TransferOptions(host=_way_to(_split(url)[0]), checksums=False, tls=tls)


def _means(token: str, options: TransferOptions, tls: Certificates | None) -> Means:
    engine = TransferEngine(cluster_token=token, options=options, name=f"client-{os.getpid()}")
    engine.start()
    return Means.over(engine, Backstage(), Channels(token, tls), _NUM_THREADS)


def _follow(cluster: Cluster, means: Means, url: str, timeout_s: float) -> None:
    async def make() -> Registry:
        return connect_registry(url, cluster_token=means.channels.cluster_token, tls=means.channels.tls)

    following = means.backstage.begin(cluster.follow(means.backstage.ask(make(), timeout_s)))
    following.add_done_callback(lambda _: cluster.known.set())
    if not cluster.known.wait(timeout_s):
        raise PeerLost(f"the registry did not answer within {timeout_s:.0f} s")
    if following.done():
        following.result()


def _address_of(url: str) -> str:
    host, port = _split(url)
    if not host or port is None:
        raise ConfigError("a node is named as node://host:port")
    return f"{host}:{port}"


def _split(url: str) -> tuple[str, int | None]:
    """Returns host and port of the first address in a URL, whatever its scheme."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        first = parts.netloc.rpartition("@")[2].partition(",")[0]
        address = urlsplit(f"//{first}")
        return address.hostname or "", address.port
    except ValueError as error:
        raise ConfigError("the store's address cannot be read: see kvstore.client.connect") from error


def _way_to(host: str) -> str:
    """Returns this host's address on the route to `host`, without sending anything. Loopback if it is unknown."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return own if not ipaddress.ip_address(own).is_unspecified else "127.0.0.1"
