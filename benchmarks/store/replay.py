"""Replays a conversation trace against a store. The first part of the trace fills the store. Then the hits of the whole
trace are counted, without changing the store."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.store.values import PATIENCE_S, patiently
from benchmarks.store_hit_ratio import Prompt, prompts_of
from kvstore.client import Block, KvStore, chain
from protocol.keys import KEY_BYTES, BlockKey
from traces.format import read_trace

VALUE_BYTES = 4_096
"""Small stand-in for the much larger blocks of a trace: only their presence counts."""
FILLING_SHARE = 0.5
SYNTHETIC_PROMPTS = 2_000


def prompts(trace: Path | None, limit: int) -> tuple[str, list[Prompt]]:
    """Returns a name and the first prompts of the trace, or of a synthetic one if there is none."""
    if trace is not None and trace.exists():
        return f"{trace.name}, {limit:,} requests", prompts_of(read_trace(trace, limit))
    made_up = synthetic(min(limit, SYNTHETIC_PROMPTS))
    return f"a made-up trace of {len(made_up):,} requests", made_up


def synthetic(count: int) -> list[Prompt]:
    """Returns synthetic conversations: each request continues an earlier one or starts a new one."""
    rng = random.Random(1)
    numbers = itertools.count(1)
    made: list[Prompt] = []
    for _ in range(count):
        before = rng.choice(made).keys if made and rng.random() < 0.6 else ()
        new = itertools.islice(numbers, rng.randrange(1, 12))
        keys = (*before, *(BlockKey(number.to_bytes(KEY_BYTES, "little")) for number in new))
        made.append(Prompt(keys, 512 * len(keys)))
    return made


def fill(store: KvStore, prompts: Sequence[Prompt]) -> None:
    """Puts the missing blocks of each prompt of the first half, behind the leading blocks that are present."""
    for prompt in prompts[: int(len(prompts) * FILLING_SHARE)]:
        blocks = chain(prompt.keys)
        missing = blocks[_num_leading(store, blocks) :]
        if missing:
            items = [(block, _value(block)) for block in missing]
            patiently(partial(store.batch_put, items, timeout_s=PATIENCE_S))


def hit_rate(store: KvStore, prompts: Sequence[Prompt]) -> float:
    """Returns the share of all blocks that are hits: leading blocks of a prompt that are present."""
    hits = sum(_num_leading(store, chain(prompt.keys)) for prompt in prompts)
    return hits / sum(len(prompt.keys) for prompt in prompts)


def _num_leading(store: KvStore, blocks: Sequence[Block]) -> int:
    there = patiently(partial(store.batch_exists, blocks, timeout_s=PATIENCE_S))
    return sum(1 for _ in itertools.takewhile(bool, there))


def _value(block: Block) -> bytes:
    return block.key * (VALUE_BYTES // KEY_BYTES)
