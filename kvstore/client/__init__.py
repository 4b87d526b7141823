"""Client of the KV store over all nodes of a cluster, from threads (`connect`) or from asyncio (`connect_async`)."""

from moonserve.kvstore.client.async_store import AsyncKvStore, connect_async
from moonserve.kvstore.client.cluster import NodeStats, NodeView, PoolStats
from moonserve.kvstore.client.connecting import connect
from moonserve.kvstore.client.node_access.objects import Block, Key, chain, plain_key
from moonserve.kvstore.client.store import KvStore, ReplicaChange
from moonserve.kvstore.client.store_lease import StoreLease
from moonserve.kvstore.disk.base import Pin

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
