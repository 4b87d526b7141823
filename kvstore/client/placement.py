"""Which nodes a key belongs to: weighted rendezvous hashing. Pure.

Every client that knows the same nodes ranks them alike for a key, without asking anybody. A node that joins takes over
only what is then its own, one that leaves only gives away what was. Does not know who is alive, full or near.

Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996; weights as in Schindelhauer and
Schomaker, "Weighted Distributed Hash Tables", SPAA 2005 (logarithmic method).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from protocol.keys import BlockKey, pack_keys

_SPLITMIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = np.uint64(0x94D049BB133111EB)
_FRACTION = 2.0**-53


class Placement:
    """The ranks of a fixed set of nodes, given by id and weight (bytes of capacity, say; above 0)."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.ids = tuple(sorted(weights))
        self._seeds = np.array([_seed(node) for node in self.ids], np.uint64)
        self._weights = np.array([weights[node] for node in self.ids], np.float64)

    def ranked(self, keys: Sequence[BlockKey]) -> list[list[int]]:
        """Of each key, the places in `ids` of all nodes, home first."""
        if len(self.ids) < 2:
            return [list(range(len(self.ids)))] * len(keys)
        ranks: list[list[int]] = self._scores(keys).argsort(axis=1, kind="stable").tolist()
        return ranks

    def _scores(self, keys: Sequence[BlockKey]) -> npt.NDArray[np.float64]:
        """Shape (keys, nodes); the smallest is home. Exponentially distributed, so weights act as rates."""
        words = np.frombuffer(pack_keys(keys), np.dtype("<u8")).reshape(-1, 2, 1)
        mixed = _mix(_mix(words[:, 0] ^ self._seeds) ^ words[:, 1])
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * _FRACTION
        scores: npt.NDArray[np.float64] = -np.log(uniform) / self._weights
        return scores


def _seed(node: str) -> int:
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64; multiplication wraps around."""
    x = (x ^ (x >> np.uint64(30))) * _SPLITMIX_1
    x = (x ^ (x >> np.uint64(27))) * _SPLITMIX_2
    return x ^ (x >> np.uint64(31))
