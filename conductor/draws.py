"""Stateless pseudo-random numbers that depend on names alone, so that equal histories give equal decisions. Pure.

A draw is a function of an instance's digest and a key. Highest-random-weight hashing (Thaler and Ravishankar, 1998)
over draws gives consistent choices: an instance that joins or leaves moves only the keys that it wins or had.
"""

from __future__ import annotations

import hashlib

import numpy as np

from conductor.columns import Floats, Words

# The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_WORD_MASK = 2**64 - 1
_MANTISSA_SHIFT = np.uint64(11)


def digest64(name: str | bytes, seed: int = 0) -> int:
    """Returns a 64-bit digest that is the same in every process."""
    data = name if isinstance(name, bytes) else name.encode()
    salt = (seed & _WORD_MASK).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


def draws(identities: Words, key: int) -> Floats:
    """Returns a number in [0, 1) for each identity, which looks independent of the numbers for other keys."""
    mixed = identities ^ np.uint64(key * _GAMMA & _WORD_MASK)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> _MANTISSA_SHIFT).astype(np.float64) * 2.0**-53
