"""Chooses the decode instance, where the KV lands and tokens are generated. Pure.

An instance is judged by its load when this prompt lands and half of the expected answer later, not by its current load
(`conductor.prediction.decode_forecast`). Among instances with blocks for the prompt, the one whose longer of these two
steps is smallest wins. Preferred in this order are instances within the TBT target, with a free sequence slot, and with
blocks for what all their sequences will need. If none has blocks for the prompt, the instance that has them soonest is
chosen. Ties go to the least recently chosen instance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moonserve.conductor.members import Instance
from moonserve.conductor.placement.decision import DecodeColumns
from moonserve.conductor.prediction.decode_forecast import DecodeForecast, ExpectedEnds
from moonserve.conductor.prediction.instance_table import DecodeTable, Flags, Floats, Ints


class NewSequence(NamedTuple):
    """The sequence that is to land."""

    num_prompt_tokens: int
    needed_blocks: int
    block_size: int
    expected_output: float  # tokens
    lands_at: float  # predicted time of the first token
    num_overtaking: float  # sequences not placed yet that land before it, per instance


def score_decodes(decodes: DecodeTable, outlook: DecodeForecast, newcomer: NewSequence, now: float) -> DecodeColumns:
    """Predicts every candidate's steps with the request added. Copies columns that change: the result outlives them."""
    half = newcomer.expected_output / 2
    prompt = float(newcomer.num_prompt_tokens)
    steps = outlook.predict_steps(
        decodes,
        instants=(now, newcomer.lands_at, newcomer.lands_at + half * outlook.pace_s),
        own_tokens=(prompt, prompt, prompt + half),
        num_overtaking=newcomer.num_overtaking,
        expected_output=newcomer.expected_output,
        needed_blocks=newcomer.needed_blocks,
        block_size=newcomer.block_size,
    )
    return DecodeColumns(
        decodes.ids,
        steps.num_seqs,
        steps.context_tokens,
        steps.landing_seqs,
        steps.landing_tokens,
        decodes.free_blocks.copy(),
        newcomer.needed_blocks,
        steps.spare_blocks,
        steps.has_slot,
        steps.tbt_s,
        steps.landing_tbt_s,
        steps.later_tbt_s,
        decodes.chosen_at.copy(),
    )


def best_decode(
    columns: DecodeColumns,
    instances: Sequence[Instance],
    within: Flags,
    block_size: int,
    now: float,
) -> tuple[int, float]:
    """Returns the row of the best candidate, and the seconds until it has blocks for the prompt.

    `instances`: one per row; `within`: rows that meet the TBT target, which are preferred.
    """
    fits = columns.free_blocks >= columns.needed_blocks
    if not np.count_nonzero(fits):
        return _soonest(columns, instances, block_size, now)
    preferences = (within, columns.has_slot, columns.spare_blocks >= 0)
    among = fits & preferences[0] & preferences[1] & preferences[2]
    if not np.count_nonzero(among):
        among = fits
        for preference in preferences:  # most important first
            both = among & preference
            among = both if np.count_nonzero(both) else among
    worst_s = np.maximum(columns.landing_tbt_s, columns.later_tbt_s)
    return lowest_score(worst_s, columns.chosen_at, among), 0.0


def lowest_score(score: Floats | Ints, chosen_at: Ints, among: Flags | None = None) -> int:
    """Returns the row with the smallest score among those in `among`; of ties, the least recently chosen one."""
    if among is not None:
        score = np.where(among, score, np.inf)
    first = int(score.argmin())
    ties = (score == score[first]).nonzero()[0]
    return first if len(ties) == 1 else int(ties[chosen_at[ties].argmin()])


def _soonest(columns: DecodeColumns, instances: Sequence[Instance], block_size: int, now: float) -> tuple[int, float]:
    missing = (columns.needed_blocks - columns.free_blocks).tolist()
    waits = np.array(
        [
            _wait_s(instance.decode.expected_ends(now), blocks, block_size, tbt_s)
            for instance, blocks, tbt_s in zip(instances, missing, columns.tbt_s.tolist(), strict=True)
        ]
    )
    best = lowest_score(waits, columns.chosen_at)
    return best, float(waits[best])


def _wait_s(drain: ExpectedEnds, missing_blocks: int, block_size: int, tbt_s: float) -> float:
    """Returns the seconds until expected ends of sequences have freed this many blocks."""
    if not len(drain.ends_s):  # the blocks are held by sequences that another conductor placed
        return tbt_s
    blocks = drain.tokens // block_size + 1
    enough = int(np.searchsorted(blocks.cumsum(), missing_blocks))
    return float(drain.ends_s[min(enough, len(drain.ends_s) - 1)])
