"""Which of several active conductors places a request, or schedules an instance. Pure.

Each active conductor is a *shard*: it alone places requests on the instances that are registered with it. A prompt
belongs to the first of its blocks that is not *hot*, which means that too many prompts share it for one shard. Weighted
rendezvous hashing (Schindelhauer and Schomaker, 2005) puts the shards in an order for each key; a shard that joins,
leaves or changes its weight moves only the keys that it wins or loses.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import xxhash

from moonserve.protocol.kv_blocks import BlockKey, digest64

HotPrefixes = Mapping[BlockKey, int]
"""Key of a block that is hot → index in the chain at which the prompts that share it differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """An active conductor and its share of the cluster."""

    address: str
    weight: float  # share of the keys, relative to other shards; 0 = none
    seed: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", digest64(self.address))

    @classmethod
    def of_workers(cls, address: str, num_prefills: int, num_decodes: int) -> Self:
        """Returns the shard with its capacity as weight: 0 if it cannot place anything."""
        return cls(address=address, weight=float(num_prefills if num_decodes else 0))


def in_order(key: bytes, shards: Iterable[Shard]) -> list[Shard]:
    """Returns the shards in the order in which they are asked for `key`; those of weight 0 last."""

    def score(shard: Shard) -> tuple[float, int]:
        draw = xxhash.xxh3_64_intdigest(key, shard.seed)
        return -shard.weight / math.log((draw + 0.5) / 2**64), draw

    return sorted(shards, key=score, reverse=True)


def merged_hot(parts: Iterable[HotPrefixes]) -> HotPrefixes:
    """Returns what is hot at any shard, with the earliest place at which its prompts differ."""
    merged: dict[BlockKey, int] = {}
    for part in parts:
        for key, branch in part.items():
            merged[key] = min(branch, merged.get(key, branch))
    return merged


def routing_key(block_keys: Sequence[BlockKey], hot: HotPrefixes, otherwise: bytes) -> bytes:
    """Returns the key by which a prompt is routed: its first block that is not hot, or `otherwise`."""
    depth = 0
    while depth < len(block_keys):
        key = block_keys[depth]
        branch = hot.get(key)
        if branch is None:
            return key
        depth = max(branch, depth + 1)
    return otherwise
