"""Builds a store client from a URL. The only module of the client that reads the environment."""

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from moonserve.kvstore.client.cluster import Cluster
from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.node import ClientResources
from moonserve.kvstore.client.store import KvStore
from moonserve.protocol.errors import ConfigError, PeerLost
from moonserve.protocol.membership.registry import Registry
from moonserve.protocol.membership.registry.client import connect_registry as connect_registry
from moonserve.protocol.process.tls import Certificates, TlsFiles, load_certificates
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import TransferEngine, TransferOptions

TOKEN_VARIABLE = "MOONSERVE_CLUSTER_TOKEN"
NODE_SCHEME = "node"
_NUM_THREADS = 16
"""Concurrent calls to nodes, over all callers; a further call waits for a thread."""


def connect(
    url: str,
    *,
    cluster_token: str | None = None,
    options: TransferOptions | None = None,
    engine: TransferEngine | None = None,
    tls: TlsFiles | None = None,
    timeout_s: float | None = None,
) -> KvStore:
    """Connects to the store of a cluster, found through its registry, or to a single node.

    `url`: `redis://…`, `redis+sentinel://…` or `host:port` of the directory process for a cluster; `node://host:port`
    for a single node. The default token is MOONSERVE_CLUSTER_TOKEN. `tls` is for clusters with `--tls-certificate`; it
    covers KV too, unless `options` are given. A running `engine` is used instead of an own one, and closed with the
    client. Without `timeout_s` the limit is that of any call. Raises ConfigError,
    Unauthenticated, and PeerLost if the registry does not answer in time.
    """
    token = cluster_token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"no cluster token: give cluster_token or set {TOKEN_VARIABLE}")
    certificates = None if tls is None else load_certificates(tls)
    resources = _resources(token, engine or options or default_options(url, tls), certificates)
    cluster = Cluster(resources)
    try:
        if url.startswith(f"{NODE_SCHEME}://"):
            cluster.use_single_node(_address_of(url))
        else:
            _follow(cluster, resources, url, Deadline(timeout_s).left_s())
        return KvStore(cluster, resources)
    except BaseException:  # also on interruption: nothing else could close them
        cluster.close()
        resources.close()
        raise


def default_options(url: str, tls: TlsFiles | None = None) -> TransferOptions:
    """Returns the default transfer options: transfers use the local address that leads to the registry.

    Slices have no checksums of their own, because the reader or the committing node verifies each object.
    """
    return TransferOptions(host=_local_address_towards(_split(url)[0]), checksums=False, tls=tls)


def _resources(token: str, engine: TransferEngine | TransferOptions, tls: Certificates | None) -> ClientResources:
    if isinstance(engine, TransferOptions):
        engine = TransferEngine(cluster_token=token, options=engine, name=f"client-{os.getpid()}")
        engine.start()
    return ClientResources.over(engine, BackgroundLoop(), Channels(token, tls), _NUM_THREADS)


def _follow(cluster: Cluster, resources: ClientResources, url: str, timeout_s: float) -> None:
    async def make() -> Registry:
        return connect_registry(url, cluster_token=resources.channels.cluster_token, tls=resources.channels.tls)

    following = resources.background.start(cluster.follow(resources.background.run(make(), timeout_s)))
    following.add_done_callback(lambda _: cluster.is_known.set())
    if not cluster.is_known.wait(timeout_s):
        raise PeerLost(f"the registry did not answer within {timeout_s:.0f} s")
    if following.done():
        following.result()


def _address_of(url: str) -> str:
    host, port = _split(url)
    if not host or port is None:
        raise ConfigError("the address of a node must be node://host:port")
    return f"{host}:{port}"


def _split(url: str) -> tuple[str, int | None]:
    """Returns host and port of the first address in a URL, whatever its scheme."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        first = parts.netloc.rpartition("@")[2].partition(",")[0]
        address = urlsplit(f"//{first}")
        return address.hostname or "", address.port
    except ValueError as error:
        raise ConfigError("the store's address cannot be read: see moonserve.kvstore.client.connect") from error


def _local_address_towards(host: str) -> str:
    """Returns this host's address on the route to `host`, without sending anything. Loopback if it is unknown."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return own if not ipaddress.ip_address(own).is_unspecified else "127.0.0.1"
