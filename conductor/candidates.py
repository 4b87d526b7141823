"""Selects the prefill and decode instances that may serve a prompt, and builds the policy's view of them. Pure.

An instance is a candidate if it is not draining, not excluded, and its pool is large enough for the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from conductor.columns import DecodeTable, Ints, PrefillTable, Table
from conductor.cost.accuracy import Times
from conductor.decision import PrefillColumns
from conductor.events import Place
from conductor.members import Instance, Members
from conductor.policies.base import Looks, Offers, Weighed
from conductor.prefix import PrefixMap
from protocol.errors import InvalidRequest, NoWorker
from protocol.ids import Role
from protocol.layout import KvLayout

T = TypeVar("T", bound=Table)


@dataclass(slots=True, eq=False)
class Able(Generic[T]):
    """Instances that may serve a prompt; `table` and `instances` have the same rows."""

    table: T
    instances: Sequence[Instance]


def eligible(
    members: Members, place: Place, excluded: Sequence[str]
) -> tuple[Able[PrefillTable], Able[DecodeTable], KvLayout]:
    """Returns the prefill and decode candidates and the KV layout. Raises NoWorker if a role has no available instance,
    InvalidRequest if no instance could ever serve the prompt."""
    prefill_rows = _available(Role.PREFILL, members.prefills, excluded)
    decode_rows = _available(Role.DECODE, members.decodes, excluded)
    layout, tokens = _check_prompt(members, place), place.num_prompt_tokens
    prefills, decodes = members.with_role(Role.PREFILL), members.with_role(Role.DECODE)
    return (
        _fitting(members.prefills, prefills, prefill_rows, layout.blocks_for(tokens)),
        _fitting(members.decodes, decodes, decode_rows, layout.blocks_for(tokens + 1)),
        layout,
    )


def _check_prompt(members: Members, place: Place) -> KvLayout:
    layout, limit = members.layout, members.max_model_len
    assert layout is not None, "a worker is available, so there is a layout"
    if place.num_prompt_tokens < 1:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if place.num_prompt_tokens + 1 > limit:
        raise InvalidRequest(
            f"the prompt has {place.num_prompt_tokens} tokens; with at least one generated "
            f"token that is more than the model's limit of {limit}",
            param="prompt",
        )
    if len(place.block_keys) > place.num_prompt_tokens // layout.block_size:
        raise InvalidRequest("there are more block keys than full blocks in the prompt")
    return layout


def _available(role: Role, table: Table, excluded: Sequence[str]) -> Ints | None:
    """Returns the rows of instances that accept this request; None = all."""
    is_open = table.is_open
    if excluded:
        is_open = is_open & ~np.isin(table.ids, excluded)
    if len(table) and np.count_nonzero(is_open) == len(is_open):
        return None
    rows = np.flatnonzero(is_open)
    if not rows.size:
        state = "draining or excluded" if len(table) else "alive"
        verb = "every" if len(table) else "no"
        raise NoWorker(f"{verb} {role} instance is {state}")
    return rows


def _fitting(table: T, instances: Sequence[Instance], rows: Ints | None, num_blocks: int) -> Able[T]:
    """Returns the instances of the given rows whose pools are large enough."""
    pools = table.num_blocks
    if rows is None:
        if pools[pools.argmin()] >= num_blocks:
            return Able(table, instances)
        rows = np.arange(len(table))
    fitting = rows[pools[rows] >= num_blocks]
    if not fitting.size:
        raise InvalidRequest(
            f"the prompt needs {num_blocks} KV blocks and no {instances[0].role} instance has more "
            f"than {pools[rows].max()}",
            param="prompt",
        )
    return Able(table.take(fitting), [instances[row] for row in fitting.tolist()])


def offers_for(
    able: Able[PrefillTable],
    prefixes: PrefixMap,
    layout: KvLayout,
    now: float,
) -> Offers:
    """Returns the columns that a policy weighs, one row per candidate, for this prompt."""
    prefills = able.table
    device_blocks, prefix_blocks = prefixes.own_blocks(prefills)
    local_s = layout.block_bytes / prefills.local_bytes_per_s
    remote_s = prefixes.remote_s_per_block(prefills, prefix_blocks, layout.block_bytes, now)
    return Offers(
        prefills.identity,
        prefills.chosen_at.copy(),  # the decision record outlives the table
        device_blocks,
        prefix_blocks,
        prefills.estimate_s(now),
        local_s,
        remote_s,
        prefills.c0,
        prefills.c1,
        prefills.c2,
        now,
        Looks(able.instances, now),
    )


def record(prefills: PrefillTable, offers: Offers, weighed: Weighed) -> PrefillColumns:
    """Returns all prediction terms of every candidate, for the decision record."""
    return PrefillColumns(
        prefills.ids,
        offers.device_blocks,
        offers.prefix_blocks,
        weighed.reuse_blocks,
        weighed.load_s,
        weighed.transfer_s,
        offers.queue_s if weighed.queue_s is None else weighed.queue_s,
        weighed.prefill_s,
        weighed.ttft_s,
        np.zeros(len(weighed.ttft_s)) if weighed.added_s is None else weighed.added_s,
        offers.chosen_at,
    )


def predicted_times(prefills: PrefillColumns, row: int, ttft_s: float) -> Times:
    """Returns the predicted times of one row. `ttft_s`: the decision's TTFT, which includes landing and overhead."""
    return Times(
        ttft_s=ttft_s,
        queue_s=float(prefills.queue_s[row]),
        transfer_s=float(prefills.load_s[row] + prefills.transfer_s[row]),
        prefill_s=float(prefills.prefill_s[row]),
    )
