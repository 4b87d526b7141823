"""Configuration of a seed's cluster. It is so small that every resource runs short from time to time."""

import random

from moonserve.decode_worker.decisions.speculation import Speculation

DRAFTS = Speculation(num_tokens=4, lookup_max=3, lookup_min=1, max_rows=12, costs=None)


class Terms:
    """Configuration of one world. Blocks have four tokens; times are virtual seconds."""

    max_model_len = 48
    landing_ttl_s = 6.0
    transfer_timeout_s = 3.0
    time_limit_s = 120.0

    def __init__(self, seed: int, rng: random.Random) -> None:
        self.seed = seed
        self.num_prefill = rng.choice((1, 2, 2))
        self.num_decode = rng.choice((1, 2, 2))
        self.num_gateways = rng.choice((1, 1, 2))
        self.has_store = rng.random() < 0.7
        # A pool of store nodes with disks, a directory and clients, instead of a serving cluster.
        self.is_pool = rng.random() < 0.2
        self.prefill_blocks = rng.randint(12, 24)
        self.decode_blocks = rng.randint(13, 24)
        self.store_blocks = rng.randint(6, 40)
        self.prefill_tokens = rng.choice((4, 8, 16))  # max. tokens per step
        self.max_num_seqs = rng.choice((2, 4))
        self.runs_ahead = rng.random() < 0.3
        self.speculation = DRAFTS if seed % 2 else None
        self.policy = rng.choice(("moonserve", "global-cache-aware", "random"))
