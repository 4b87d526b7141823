"""Redis through redis-py over TCP. Values arrive as new `bytes`: redis-py cannot read into existing memory."""

from collections.abc import Sequence
from typing import Any, cast

import redis

from benchmarks.store.speed import client
from benchmarks.store.speed.workload import POOL_BYTES, Batch, Load
from benchmarks.transfer.contestant import private_pool

TIMEOUT_S = 20.0
MULTI, PIPELINE = "multi", "pipeline"


class Client(client.StoreClient):
    def __init__(self, facts: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(facts, options)
        self.pool = private_pool(POOL_BYTES)
        self._redis = redis.Redis(port=facts["port"], socket_timeout=TIMEOUT_S)
        self._redis.ping()

    def modes(self, load: Load) -> Sequence[str]:
        return (MULTI, PIPELINE) if load.batch > 1 else ("",)

    def prepared(self, batch: Batch, load: Load, mode: str) -> Any:
        if load.op != "put":
            return mode, batch.keys
        values = [self.pool[at : at + batch.length].data for at in batch.offsets]
        return mode, dict(zip(batch.keys, values, strict=True))

    def put(self, call: tuple[str, dict[str, Any]]) -> None:
        mode, items = call
        if mode == PIPELINE:
            pipeline = self._redis.pipeline(transaction=False)
            for key, value in items.items():
                pipeline.set(key, value)
            pipeline.execute()
        elif mode == MULTI:
            self._redis.mset(items)
        else:
            [(key, value)] = items.items()
            self._redis.set(key, value)

    def get(self, call: tuple[str, tuple[str, ...]]) -> Sequence[Any]:
        mode, keys = call
        if mode == PIPELINE:
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys:
                pipeline.get(key)
            return pipeline.execute()
        if mode == MULTI:
            return cast(list[Any], self._redis.mget(keys))
        return [self._redis.get(keys[0])]

    def exists(self, call: tuple[str, tuple[str, ...]]) -> bool:
        return bool(self._redis.exists(call[1][0]))

    def remove(self, keys: Sequence[str]) -> None:
        self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()
