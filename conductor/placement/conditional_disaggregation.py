"""Conditional disaggregation: decides if a decode worker should prefill a prompt itself. Pure.

A decode worker can compute a prompt in chunks within its decode steps, in the time that the TBT objective leaves of a
step (`protocol.step_time`). Then there is no handoff, and the prompt does not wait behind long ones. The cost is
longer steps for all sequences there, and one decode step per chunk for the prompt. So it suits prompts with little to
compute: short ones and nearly fully cached ones. It is chosen if the first token is predicted sooner than on the best
prefill worker and both objectives are met. Does not know policies and tenants' turns.
"""

import numpy as np

from moonserve.conductor.placement.decision import DecodeColumns, LocalPrefillColumns
from moonserve.conductor.prediction.instance_table import DecodeTable, Floats, Ints
from moonserve.protocol.step_time import MIN_CHUNK_TOKENS


def score_local_prefill(
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
) -> LocalPrefillColumns:
    """Predicts the prefill of a prompt on every decode instance. `decodes` and `columns` have the same rows;
    `remote_s_per_block`: from the best store, which has `best_blocks` of the prompt, to each instance; `most_step_s`:
    limit of a step with a chunk."""
    reuse_blocks = np.maximum(device_blocks, best_blocks)
    cached = reuse_blocks * block_size
    missing, tokens = num_tokens - cached, num_tokens
    work_s = decodes.p1 * missing + decodes.p2 * (tokens * tokens - cached * cached)
    step_s = columns.tbt_s
    room_s = most_step_s - step_s - decodes.p0
    least_s = MIN_CHUNK_TOKENS * (decodes.p1 + 2.0 * decodes.p2 * tokens)
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
    return LocalPrefillColumns(
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


def best_local_prefill(columns: LocalPrefillColumns, *, sooner_than_s: float) -> int | None:
    """Returns the row with the soonest first token among instances that meet both objectives; None if there is none
    below `sooner_than_s`."""
    if not np.count_nonzero(columns.keeps_slo):
        return None
    best = int(np.where(columns.keeps_slo, columns.ttft_s, np.inf).argmin())
    return best if columns.ttft_s[best] < sooner_than_s else None
