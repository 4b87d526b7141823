"""Home nodes of keys, by weighted rendezvous hashing. Pure.

All clients that know the same nodes rank them identically for a key, without communication. A node that joins takes
over only the keys that become its own, and one that leaves gives away only its own. Does not know which nodes are
alive, full or near.

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
    """Ranks a fixed set of nodes, given by id and weight (for example bytes of capacity; above 0)."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.ids = tuple(sorted(weights))
        self._seeds = np.array([_seed(node) for node in self.ids], np.uint64)
        self._weights = np.array([weights[node] for node in self.ids], np.float64)

    def ranked(self, keys: Sequence[BlockKey]) -> list[list[int]]:
        """Returns for each key the places in `ids` of all nodes, home first."""
        if len(self.ids) < 2:
            return [list(range(len(self.ids)))] * len(keys)
        ranks: list[list[int]] = self._scores(keys).argsort(axis=1, kind="stable").tolist()
        return ranks

    def _scores(self, keys: Sequence[BlockKey]) -> npt.NDArray[np.float64]:
        """Returns scores of shape (keys, nodes); smallest is home. Exponentially distributed: weights act as rates."""
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
