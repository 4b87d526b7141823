"""Which instances may serve a prompt: open, not excluded, with pools that are large enough. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from conductor.columns import DecodeTable, Ints, PrefillTable, Table
from conductor.events import Place
from conductor.members import Instance, Members
from protocol.errors import InvalidRequest, NoWorker
from protocol.ids import Role
from protocol.layout import KvLayout

T = TypeVar("T", bound=Table)


@dataclass(slots=True, eq=False)
class Able(Generic[T]):
    """Instances that may serve a prompt, row by row."""

    table: T
    instances: Sequence[Instance]


def eligible(
    members: Members, place: Place, excluded: Sequence[str]
) -> tuple[Able[PrefillTable], Able[DecodeTable], KvLayout]:
    """Those of both roles, and the layout of the prompt's blocks. Raises NoWorker when a role has no instance left,
    InvalidRequest when none could ever serve the prompt."""
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
    """Rows of instances that take this request; None = all."""
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


def _fitting(
    table: T, instances: Sequence[Instance], rows: Ints | None, num_blocks: int
) -> Able[T]:
    """Of those rows, the ones whose pools are large enough."""
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
