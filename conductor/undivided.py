"""Whether a decode worker had better read a prompt itself: conditional disaggregation. Pure.

A decode worker can compute a prompt in chunks beside its decode steps, within what the TBT objective leaves of a step
(`protocol.step_budget`). Then nothing is handed off, and the prompt waits behind no long one. It pays for that with
the steps of all who decode there, and with a decode step per chunk of its own. So it suits prompts of which little is
to be computed: short ones and those that are nearly all cached. It is chosen where it is predicted to bring the first
token sooner than the best prefill worker would, with both objectives kept. What this does not know: policies, and
whose turn it is.
"""

from __future__ import annotations

import numpy as np

from conductor.columns import DecodeTable, Floats, Ints
from conductor.decision import DecodeColumns, UndividedColumns
from protocol.step_budget import LEAST_CHUNK


def weigh_undivided(
    decodes: DecodeTable,
    columns: DecodeColumns,
    device_blocks: Ints,
    remote_s_per_block: Floats,
    *,
    num_tokens: int,
    block_size: int,
    best_blocks: int,
    most_step_s: float,
    most_tbt_s: float,
    most_ttft_s: float,
) -> UndividedColumns:
    """`decodes` and `columns`: the same instances, row by row; `remote_s_per_block`: from the best store to each, which
    has `best_blocks` of the prompt's; `most_step_s`: of a step with a chunk."""
    reuse_blocks = np.maximum(device_blocks, best_blocks)
    cached = reuse_blocks * block_size
    missing, tokens = num_tokens - cached, num_tokens
    work_s = decodes.p1 * missing + decodes.p2 * (tokens * tokens - cached * cached)
    step_s = columns.tbt_s
    room_s = most_step_s - step_s - decodes.p0
    least_s = LEAST_CHUNK * (decodes.p1 + 2.0 * decodes.p2 * tokens)
    has_room = decodes.reads_prompts & columns.has_slot & (room_s > least_s)
    has_room &= columns.free_blocks >= columns.needed_blocks
    by_time = np.ceil(work_s / np.where(has_room, room_s, np.inf))
    by_tokens = np.ceil(missing / np.maximum(decodes.step_tokens - columns.num_seqs, 1.0))
    num_steps = np.maximum(np.maximum(by_time, by_tokens), 1.0).astype(np.int64)
    load_s = (reuse_blocks - device_blocks) * remote_s_per_block
    queue_s = step_s / 2 + decodes.reading_s
    prefill_s = num_steps * (step_s + decodes.p0) + work_s
    ttft_s = np.maximum(load_s, queue_s) + prefill_s
    keeps_slo = has_room & (columns.landing_tbt_s <= most_tbt_s)
    keeps_slo &= ttft_s <= most_ttft_s
    return UndividedColumns(
        columns.instance_id,
        device_blocks,
        reuse_blocks,
        load_s,
        queue_s,
        step_s,
        decodes.p0 + work_s / num_steps,
        num_steps,
        prefill_s,
        ttft_s,
        keeps_slo,
    )


def best_undivided(columns: UndividedColumns, *, sooner_than_s: float) -> int | None:
    """Row of the instance where the first token comes soonest, of those that keep both objectives; None = no one, or
    not within so many seconds."""
    if not np.count_nonzero(columns.keeps_slo):
        return None
    best = int(np.where(columns.keeps_slo, columns.ttft_s, np.inf).argmin())
    return best if columns.ttft_s[best] < sooner_than_s else None
