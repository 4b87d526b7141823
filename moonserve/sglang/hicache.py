"""`MoonserveHiCache`: moonserve's store as a dynamic storage backend of SGLang's HiCache.

A page is one object. Pages move between SGLang's host memory and the store without a copy in between, whatever the
layout of the host pool. The interface is SGLang's `HiCacheStorage`; keys are its chained hashes of tokens. Errors of
the store are misses: SGLang then computes the page.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonserve.kvstore.client import KvStore, connect
from moonserve.kvstore.client.connecting import TOKEN_VARIABLE
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.protocol.errors import ConfigError, MoonserveError
from moonserve.transfer import Segment

if TYPE_CHECKING:
    import torch

    Base = object
else:
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as Base
    except ImportError:  # outside SGLang: tests of the contract
        Base = object

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


class MoonserveHiCache(Base):
    """Pages by key. SGLang's threads call it concurrently."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`extra_config`: `join`, the store's URL (`kvstore.client.connect`). Raises ConfigError, PeerLost."""
        extra = dict(storage_config.extra_config or {})
        join = extra.get("join", "")
        if not join:
            raise ConfigError('the HiCache backend needs the store\'s URL in its extra_config: {"join": "redis://…"}')
        self._store: KvStore = connect(join, cluster_token=os.environ.get(TOKEN_VARIABLE))
        self._suffix = _suffix(storage_config)
        self._pool: Any = None
        self._memory: Segment | None = None

    # Pages in the registered host pool

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self._pool = mem_pool_host
        self._memory = self._store.register(mem_pool_host.kv_buffer)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Reads pages into the host pool at `host_indices`, and tells which were read."""
        try:
            return self._store.batch_get_scattered(
                self._keys(keys), self._slots(keys, host_indices), timeout_s=_TIMEOUT_S
            )
        except MoonserveError as error:
            log.warning("%d pages cannot be read: %s", len(keys), error)
            return [False] * len(keys)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool, all or none."""
        try:
            self._store.batch_put_gathered(self._keys(keys), self._slots(keys, host_indices), timeout_s=_TIMEOUT_S)
        except MoonserveError as error:
            log.warning("%d pages cannot be stored: %s", len(keys), error)
            return [False] * len(keys)
        return [True] * len(keys)

    def _slots(self, keys: Sequence[str], host_indices: torch.Tensor) -> BufferSlots:
        """Returns the pieces of each page, as the host pool lays them out."""
        assert self._memory is not None, "SGLang registers its host pool first"
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        per_page = len(pointers) // len(keys)
        offsets = np.array(pointers, np.uint64).reshape(len(keys), per_page) - np.uint64(self._memory.base)
        return BufferSlots.pages(self._memory, offsets, sizes[:per_page])

    # Single values

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Reads a value into `target_location`, a contiguous tensor of its size, and returns that; None = missing."""
        try:
            value = self._store.get(self._key(key), timeout_s=_TIMEOUT_S)
        except MoonserveError as error:
            log.warning("page %s cannot be read: %s", key, error)
            return None
        view = _bytes_of(target_location)
        if value is None or len(value) != view.nbytes:
            return None
        view[:] = np.frombuffer(value, np.uint8)
        return target_location  # type: ignore[no-any-return]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        try:
            pairs = [(self._key(key), _bytes_of(value).data) for key, value in zip(keys, values, strict=True)]
            self._store.batch_put(pairs, timeout_s=_TIMEOUT_S)
        except MoonserveError as error:
            log.warning("%d pages cannot be stored: %s", len(keys), error)
            return False
        return True

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many leading keys are stored."""
        try:
            present = self._store.batch_exists(self._keys(keys), timeout_s=_TIMEOUT_S)
        except MoonserveError as error:
            log.warning("the store cannot be asked: %s", error)
            return 0
        return present.index(False) if False in present else len(present)

    def get_stats(self) -> None:
        """The store's own metrics have them."""

    def close(self) -> None:
        self._store.close()

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._key(key) for key in keys]

    def _key(self, key: str) -> bytes:
        return f"{key}{self._suffix}".encode()


def _suffix(config: Any) -> str:
    """Returns what distinguishes the pages of one rank of one model. Ranks of MLA models hold equal pages."""
    parts = ["sglang", config.model_name or ""]
    if not config.is_mla_model:
        parts.append(f"tp{config.tp_rank}/{config.tp_size}")
    for name in ("pp", "attn_cp"):
        rank, size = getattr(config, f"{name}_rank", 0), getattr(config, f"{name}_size", 1)
        if size > 1:
            parts.append(f"{name}{rank}/{size}")
    return "|" + "|".join(parts)


def _bytes_of(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns a view of a contiguous tensor's bytes, whatever its dtype."""
    import torch

    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.view(torch.uint8).reshape(-1).numpy()
    return flat
