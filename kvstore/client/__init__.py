"""Client of the KV store: reads and writes values over all nodes of a cluster, from threads or from asyncio.

    with connect("node://127.0.0.1:7001", cluster_token="…") as store:
        store.put(b"key", b"value")
        assert store.get(b"key") == b"value"

A missing value, an empty value, an unreachable node and a full store have four different results: None, `b""`, PeerLost
and Overloaded.
"""

from kvstore.client.aio import AsyncKvStore, connect_async
from kvstore.client.connecting import connect
from kvstore.client.keys import Block, Key, chain, plain_key
from kvstore.client.pool import NodeStats, NodeView, PoolStats
from kvstore.client.store import KvStore, ReplicaChange
from kvstore.client.store_lease import StoreLease
from kvstore.disk.base import Pin

__all__ = [
    "AsyncKvStore",
    "Block",
    "Key",
    "KvStore",
    "NodeStats",
    "NodeView",
    "Pin",
    "PoolStats",
    "ReplicaChange",
    "StoreLease",
    "chain",
    "connect",
    "connect_async",
    "plain_key",
]
