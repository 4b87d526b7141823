"""Selects the instances that may serve a prompt, and the rank that tenant and priority allow it in their queues; makes
the policy's columns. Pure.

An instance is a candidate if it is not draining, not excluded, and its pool is large enough for the prompt. The policy
sees the waits that this prompt would have and gives a rank as if there were no tenants or priorities. The prompt is
placed with the lower of that rank and its tenant's limit, shifted by its priority.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from moonserve.conductor.events import Place
from moonserve.conductor.members import Instance, Members
from moonserve.conductor.placement.decision import PrefillColumns
from moonserve.conductor.placement.policies.base import PrefillCandidates, QueueWaits, Scores
from moonserve.conductor.placement.prefix_lookup import PrefixMap
from moonserve.conductor.placement.tenant_fairness import Fairness, TenantStanding
from moonserve.conductor.prediction.accuracy import Times
from moonserve.conductor.prediction.instance_table import DecodeTable, Floats, Ints, PrefillTable, Table
from moonserve.protocol.errors import InvalidRequest, NoWorker
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.request import Role

T = TypeVar("T", bound=Table)


@dataclass(slots=True, eq=False)
class EligibleInstances(Generic[T]):
    """Instances that may serve a prompt; `table` and `instances` have the same rows."""

    table: T
    instances: Sequence[Instance]


def find_eligible(
    members: Members, place: Place, excluded: Sequence[str]
) -> tuple[EligibleInstances[PrefillTable], EligibleInstances[DecodeTable], KvLayout]:
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


def _fitting(table: T, instances: Sequence[Instance], rows: Ints | None, num_blocks: int) -> EligibleInstances[T]:
    """Returns the instances of the given rows whose pools are large enough."""
    pools = table.num_blocks
    if rows is None:
        if pools[pools.argmin()] >= num_blocks:
            return EligibleInstances(table, instances)
        rows = np.arange(len(table))
    fitting = rows[pools[rows] >= num_blocks]
    if not fitting.size:
        raise InvalidRequest(
            f"the prompt needs {num_blocks} KV blocks and no {instances[0].role} instance has more "
            f"than {pools[rows].max()}",
            param="prompt",
        )
    return EligibleInstances(table.take(fitting), [instances[row] for row in fitting.tolist()])


def prefill_candidates(
    able: EligibleInstances[PrefillTable],
    prefixes: PrefixMap,
    layout: KvLayout,
    now: float,
) -> PrefillCandidates:
    """Returns the columns that a policy weighs, one row per candidate, for this prompt."""
    prefills = able.table
    device_blocks, prefix_blocks = prefixes.own_blocks(prefills)
    local_s = layout.block_bytes / prefills.local_bytes_per_s
    remote_s = prefixes.remote_s_per_block(prefills, prefix_blocks, layout.block_bytes, now)
    return PrefillCandidates(
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
        QueueWaits(able.instances, now),
    )


def prefill_columns(prefills: PrefillTable, offers: PrefillCandidates, weighed: Scores) -> PrefillColumns:
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


# Seconds that one priority step counts in a place; all ranks and waits are shorter. More than MAX_PRIORITY steps would
# make places too large for a float to resolve a microsecond, so priorities are clamped here. Workers tell more apart.
PRIORITY_STEP_S = 1e6
MAX_PRIORITY = 1000


class QueueTerms(NamedTuple):
    """Queueing terms of one prompt at every instance that may serve it."""

    standing: TenantStanding
    now: float
    priority: int  # 0 if priorities are not used
    limit: Floats | None  # highest rank that fairness allows at each instance; None = any

    @property
    def shift_s(self) -> float:
        """Seconds that its priority adds to its places."""
        return self.priority * PRIORITY_STEP_S

    def rank(self, row: int, rank: float, tie_s: Callable[[float], float]) -> float:
        """Returns the final rank at `row` for the policy's `rank`. `tie_s`: gives the seconds to add to a place so that
        it follows prompts at the same place."""
        rank += tie_s(self.now + rank + self.shift_s)
        return rank if self.limit is None else min(rank, float(self.limit[row]))


def queue_terms(fairness: Fairness, tenant: str, priority: int, links: Ints, now: float) -> QueueTerms:
    """Returns the queueing terms of a request that is placed now. `links`: of the instances that may serve it."""
    priority = max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
    standing = fairness.standing(tenant)
    places = fairness.places_to_take(standing, priority, links)
    limit = None if places is None else places - (priority * PRIORITY_STEP_S + now)
    return QueueTerms(standing, now, priority, limit)


def with_own_waits(offers: PrefillCandidates, own: QueueTerms, *, passes_others: bool) -> PrefillCandidates:
    """Returns the offers with the waits that this prompt would have. `passes_others`: if less urgent prompts wait."""
    if own.limit is None and own.priority == 0 and not passes_others:
        return offers
    last_s = PRIORITY_STEP_S / 2  # behind all prompts of its priority
    limits = np.full(len(offers.queue_s), last_s) if own.limit is None else np.minimum(own.limit, last_s)
    waits_of = QueueWaits(offers.queue_waits.instances, offers.queue_waits.now, limits, own.shift_s)
    queue_s = offers.queue_s.copy()
    rows = range(len(limits)) if passes_others else np.flatnonzero(limits < last_s).tolist()
    for row in rows:
        queue_s[row], _ = waits_of(row, last_s)
    return offers._replace(queue_s=queue_s, queue_waits=waits_of)
