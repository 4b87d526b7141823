"""Choosing the decode instance: where the KV lands and tokens are made. Pure.

Among instances with blocks for the prompt the smallest predicted TBT with this request added, instances with a free
sequence slot first; when none has the blocks, the one that will have them soonest. Equal candidates: least recently
chosen first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.columns import DecodeTable, Flags, Floats, Ints
from conductor.decision import DecodeColumns
from conductor.endings import Drain
from conductor.members import Instance


def weigh_decodes(
    decodes: DecodeTable, num_prompt_tokens: int, needed_blocks: int
) -> DecodeColumns:
    """All candidates with the request added. The record outlives the tables, so that it copies what may change."""
    num_seqs = decodes.num_seqs + 1
    context_tokens = decodes.context_tokens + num_prompt_tokens
    return DecodeColumns(
        decodes.ids,
        num_seqs,
        context_tokens,
        decodes.free_blocks.copy(),
        needed_blocks,
        num_seqs <= decodes.slots,
        decodes.step_s(num_seqs, context_tokens),
        decodes.chosen_at.copy(),
    )


def best_decode(
    columns: DecodeColumns, instances: Sequence[Instance], now: float
) -> tuple[int, float]:
    """Row of the best candidate, and seconds until it has blocks for the prompt. `instances`: of the rows."""
    among = columns.free_blocks >= columns.needed_blocks
    if not np.count_nonzero(among):
        return _soonest(columns, instances, now)
    with_slot = among & columns.has_slot
    if np.count_nonzero(with_slot):
        among = with_slot
    return least(columns.tbt_s, columns.chosen_at, among), 0.0


def least(score: Floats | Ints, chosen_at: Ints, among: Flags | None = None) -> int:
    """The row with the smallest score, of those marked in `among`; of equal ones the least recently chosen."""
    if among is not None:
        score = np.where(among, score, np.inf)
    first = int(score.argmin())
    ties = (score == score[first]).nonzero()[0]
    return first if len(ties) == 1 else int(ties[chosen_at[ties].argmin()])


def _soonest(
    columns: DecodeColumns, instances: Sequence[Instance], now: float
) -> tuple[int, float]:
    missing = (columns.needed_blocks - columns.free_blocks).tolist()
    waits = np.array(
        [
            _wait_s(instance.decode.drain(tbt_s, now), blocks, tbt_s)
            for instance, blocks, tbt_s in zip(
                instances, missing, columns.tbt_s.tolist(), strict=True
            )
        ]
    )
    best = least(waits, columns.chosen_at)
    return best, float(waits[best])


def _wait_s(drain: Drain, missing_blocks: int, tbt_s: float) -> float:
    """Seconds until expected ends of sequences have freed so many blocks."""
    if not len(drain.ends_s):  # sequences that another conductor placed
        return tbt_s
    enough = int(np.searchsorted(drain.blocks.cumsum(), missing_blocks))
    return float(drain.ends_s[min(enough, len(drain.ends_s) - 1)])
