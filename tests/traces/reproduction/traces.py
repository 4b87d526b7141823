"""Small traces on disk, with enough sharing that every figure has something to show."""

from __future__ import annotations

import json
import random
from pathlib import Path

BLOCK = 512


def write_trace(path: Path, num_requests: int = 40) -> Path:
    """Sessions of growing prompts behind one common block, two requests a second; the same for the same number."""
    draws = random.Random(3)
    fresh = iter(range(1, 1_000_000))
    sessions = [[0] for _ in range(5)]
    lines = []
    for number in range(num_requests):
        session = draws.choice(sessions)
        session += [next(fresh) for _ in range(draws.randint(1, 6))]
        own = next(fresh)  # the partial last block
        length = BLOCK * len(session) + draws.randint(1, BLOCK - 1)
        entry = {
            "timestamp": 500 * number,
            "input_length": length,
            "output_length": draws.randint(1, 40),
            "hash_ids": [*session, own],
        }
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")
    return path
