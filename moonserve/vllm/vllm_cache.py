"""What the connector needs to know of vLLM's KV cache: its groups and memory, and what a request's KV depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from moonserve.protocol.errors import ConfigError
from moonserve.vllm.kv.cache_groups import CacheGroup, Page
from moonserve.vllm.kv.chained_keys import Extras

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec)


def cache_groups_of(config: KVCacheConfig) -> list[CacheGroup]:
    """Returns vLLM's groups. Raises ConfigError for kinds of KV that are more than one page per block and layer."""
    places = {
        layer: (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for index, layer in enumerate(tensor.layers)
    }
    groups = []
    for group in config.kv_cache_groups:
        if group.is_eagle_group:
            raise ConfigError("MoonserveConnector does not support speculative decoding by a draft with its own KV")
        pages = []
        for layer in (name for name in group.layer_names if name in places):
            spec = _spec_of(group.kv_cache_spec, layer)
            if type(spec) not in _SUPPORTED:
                raise ConfigError(f"MoonserveConnector does not support the {type(spec).__name__} of layer {layer}")
            pages.append(Page(*places[layer], spec.page_size_bytes))
        groups.append(CacheGroup(group.kv_cache_spec.block_size, tuple(pages), _window_of(group.kv_cache_spec)))
    return groups


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _window_of(spec: KVCacheSpec) -> int | None:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        windows = [_window_of(each) for each in spec.kv_cache_specs.values()]
        return None if None in windows else max(window for window in windows if window is not None)
    return spec.sliding_window + spec.extra_retained_tokens if isinstance(spec, SlidingWindowSpec) else None


def memory_of(kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns all bytes of the allocation in which vLLM's caches lie. Raises ConfigError if there are several, or if
    the memory is not the host's."""
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in kv_caches.values()}
    if len(storages) != 1:
        raise ConfigError(f"MoonserveConnector expects one allocation of KV memory, not {len(storages)}")
    [storage] = storages.values()
    if storage.device.type != "cpu":
        raise ConfigError(f"MoonserveConnector does not support KV memory on {storage.device} yet")
    return torch.empty(0, dtype=torch.int8).set_(storage)


def extras_of(request: Any) -> Extras | None:
    """Returns what the KV of a request's tokens depends on beside them: LoRA, images, embeddings, cache salt."""
    if not (request.mm_features or request.lora_request or request.cache_salt or request.prompt_embeds is not None):
        return None

    def extras(first: int, last: int) -> bytes:
        keys, _ = generate_block_hash_extra_keys(request, first, last, 0)
        return repr(keys).encode()

    return extras
