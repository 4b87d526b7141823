"""What a seed's cluster is like: small enough that everything runs short now and then."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of one world. Blocks are of four tokens; times in virtual seconds."""

    seed: int
    num_prefill: int
    num_decode: int
    num_gateways: int
    has_store: bool
    is_pool: bool
    """Store nodes with disks, a directory and their clients, in place of a serving cluster."""
    prefill_blocks: int
    decode_blocks: int
    store_blocks: int
    prefill_tokens: int  # per step
    max_num_seqs: int
    runs_ahead: bool
    policy: str
    max_model_len: int = 48
    landing_ttl_s: float = 6.0
    transfer_timeout_s: float = 3.0
    time_limit_s: float = 120.0

    @classmethod
    def draw(cls, seed: int, rng: random.Random) -> Terms:
        return cls(
            seed=seed,
            num_prefill=rng.choice((1, 2, 2)),
            num_decode=rng.choice((1, 2, 2)),
            num_gateways=rng.choice((1, 1, 2)),
            has_store=rng.random() < 0.7,
            is_pool=rng.random() < 0.2,
            prefill_blocks=rng.randint(12, 24),
            decode_blocks=rng.randint(13, 24),
            store_blocks=rng.randint(6, 40),
            prefill_tokens=rng.choice((4, 8, 16)),
            max_num_seqs=rng.choice((2, 4)),
            runs_ahead=rng.random() < 0.3,
            policy=rng.choice(("moonserve", "global-cache-aware", "random")),
        )
