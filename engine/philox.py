"""Philox 4x64-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

The same (key, counter) gives the same bits in every process and on every machine, which is what makes a sampled
stream continuable elsewhere. Plain integers: one number per token is wanted, not arrays.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone."""
    return (random_bits(seed & _MASK, position) >> 11) * 2.0**-53


def random_bits(key: int, counter: int) -> int:
    """The first 64 bits for this key and counter."""
    x0, x1, x2, x3 = counter & _MASK, 0, 0, 0
    k0, k1 = key, 0
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * x0
        product1 = _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> 64) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> 64) ^ x3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return x0
