"""What a placement would have gained had another store node held its prefix. Pure.

The counterfactual is taken from the columns that decided: the earliest first token at the prefill instances beside each
store, with the whole prefix in that store, against the one that was predicted for the choice. So queues at the holders,
transfers, and blocks computed again all count, and what nobody waited for does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints, Names
from conductor.decision import Decision, PrefillColumns
from conductor.members import Members
from kvstore.directory import Directory
from kvstore.directory.table import Slots
from protocol.keys import BlockKey, pack_keys
from protocol.layout import KvLayout


class Demand(NamedTuple):
    """One placement's; shapes [stores] but for `slots`."""

    weight: int  # placements that it stands for
    slots: Slots  # [blocks] rows of the index: the longest prefix that any store has
    leaf: BlockKey  # of the last of them, which tells later whether the rows are still theirs
    stores: Names  # ids; the same array as long as no store joins or leaves
    saved_s: Floats  # earlier first token, had this store had all of them
    missing: Ints  # of them, there
    readers: frozenset[str]  # the chosen instance's home store and those that it reads from


def demand_of(
    decision: Decision,
    keys: Sequence[BlockKey],
    members: Members,
    directory: Directory,
    layout: KvLayout,
    weight: int,
) -> Demand | None:
    """`keys`: of the prompt's full blocks. None where no store has any of it."""
    keys = keys[: decision.best_blocks]
    leading = directory.leading(pack_keys(keys))
    if not keys or len(leading.slots) < len(keys):
        return None
    stores, columns = members.stores, decision.prefill_columns
    runs = np.minimum(leading.runs.take(stores.bit) * stores.is_open, len(keys))
    chosen = int(np.flatnonzero(columns.instance_id == decision.prefill)[0])
    earliest_s = _earliest_s(columns, decision.num_prompt_tokens, len(keys), members, layout)
    return Demand(
        weight,
        leading.slots,
        keys[-1],
        stores.ids,
        np.maximum(columns.ttft_s[chosen] - earliest_s, 0.0),
        len(keys) - runs,
        _readers(decision, members),
    )


def _earliest_s(
    columns: PrefillColumns, num_tokens: int, num_blocks: int, members: Members, layout: KvLayout
) -> Floats:
    """To the first token beside each store with so many blocks in it; infinite where no instance is. Shape [stores]."""
    table = members.prefills
    if len(columns.instance_id) < len(table):
        table = table.take(np.flatnonzero(np.isin(table.ids, columns.instance_id)))
    cached = num_blocks * layout.block_size
    compute_s = (
        table.c0
        + table.c1 * (num_tokens - cached)
        + table.c2 * (num_tokens * num_tokens - cached * cached)
    )
    read = np.maximum(num_blocks - columns.device_blocks, 0)
    load_s = read * layout.block_bytes / table.local_bytes_per_s
    earliest_s = np.full(len(members.stores), np.inf)
    beside = np.flatnonzero(table.has_home)
    first_s = columns.queue_s + load_s + compute_s
    np.minimum.at(earliest_s, table.home[beside], first_s[beside])
    return earliest_s


def _readers(decision: Decision, members: Members) -> frozenset[str]:
    chosen = members.find(decision.prefill)
    home = None if chosen is None else chosen.registration.home_store
    sources = (store for store, _, _ in decision.sources)
    return frozenset(sources if home is None else (home, *sources))
