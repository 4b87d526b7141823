"""Deciding one request: candidates, their predictions, the choice. Pure and without side effects.

Prefill: the policy's score over the columns of all instances that take work. Decode: `conductor.landing`. Waiting for
landing blocks counts towards TTFT. Predictions over the SLO are rejected (`conductor.admission`). Equal candidates:
least recently chosen first. A decision is a fixed number of numpy operations, however many instances there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from conductor.admission import reject_tbt, reject_ttft
from conductor.columns import DecodeTable, Ints, PrefillTable, StoreTable, Table
from conductor.cost.accuracy import Times
from conductor.cost.transfer import LOCAL_BYTES_PER_S
from conductor.decision import Decision, DecodeColumns, PrefillColumns, Rejection
from conductor.events import Place
from conductor.landing import best_decode, least, weigh_decodes
from conductor.members import Instance, Members
from conductor.policies.base import Offers, PlacementPolicy, Prompt, Weighed
from conductor.prefix import PrefixMap
from conductor.session import first_distinguishing
from kvstore.directory import Directory, Leading
from protocol.errors import InvalidRequest, NoWorker
from protocol.ids import Role
from protocol.keys import BlockKey, pack_keys
from protocol.layout import KvLayout
from protocol.request import PrefixSource

T = TypeVar("T", bound=Table)


class Plan(NamedTuple):
    """A decision with the instances it names."""

    decision: Decision
    prefill: Instance
    decode: Instance
    sources: tuple[PrefixSource, ...]
    reads: tuple[tuple[Instance, int], ...]  # blocks to read from each store
    predicted: Times
    prefill_s: float  # predicted service time
    rank: float  # with which it waits for prefill
    uncached_tokens: int
    needed_blocks: int


@dataclass(slots=True, eq=False)
class _Able(Generic[T]):
    """Instances that may serve a prompt, row by row."""

    table: T
    instances: Sequence[Instance]


class _Choice(NamedTuple):
    """The best of each role, before admission."""

    prefills: PrefillColumns
    prefill: int  # row
    decodes: DecodeColumns
    decode: int  # row
    decode_instance: Instance
    wait_s: float
    sources: tuple[PrefixSource, ...]
    best_blocks: int
    rank: float


class Planner:
    """Decides over the members and the index as they are now."""

    def __init__(
        self,
        members: Members,
        directory: Directory,
        policy: PlacementPolicy,
        *,
        ttft_slo_s: float,
        tbt_slo_s: float,
    ) -> None:
        self._members = members
        self._directory = directory
        self.policy = policy
        self._ttft_slo_s = ttft_slo_s
        self._tbt_slo_s = tbt_slo_s

    def plan(self, place: Place, now: float) -> Plan:
        """Raises NoWorker when a role has no instance left, InvalidRequest when none could ever serve the prompt."""
        excluded = sorted(place.excluded_instances)
        prefills, decodes, layout = self._candidates(place, excluded)
        # The last prompt token is always computed: its logits are the first token.
        usable = min(len(place.block_keys), (place.num_prompt_tokens - 1) // layout.block_size)
        keys = place.block_keys[:usable]
        leading = self._directory.leading(pack_keys(keys))
        prefixes = PrefixMap(leading, self._members, excluded)
        prompt = self._prompt(place, keys, leading, layout, prefixes.best_blocks)
        offers = _offers(prefills, prefixes, self._members.stores, layout, now)
        weighed = self.policy.weigh(prompt, offers)
        best = least(weighed.score, offers.chosen_at)
        prefill, reuse_blocks = prefills.instances[best], int(weighed.reuse_blocks[best])
        needed_blocks = layout.blocks_for(place.num_prompt_tokens + 1)
        decode_columns = weigh_decodes(decodes.table, place.num_prompt_tokens, needed_blocks)
        landing, wait_s = best_decode(decode_columns, decodes.instances, now)
        choice = _Choice(
            prefills=_record(prefills.table, offers, weighed),
            prefill=best,
            decodes=decode_columns,
            decode=landing,
            decode_instance=decodes.instances[landing],
            wait_s=wait_s,
            sources=prefixes.sources(prefill, int(offers.device_blocks[best]), reuse_blocks),
            best_blocks=prefixes.best_blocks,
            rank=0.0 if weighed.rank is None else float(weighed.rank[best]),
        )
        decision = self._decide(place, choice, now)
        return Plan(
            decision=decision,
            prefill=prefill,
            decode=choice.decode_instance,
            sources=choice.sources,
            reads=self._reads(choice.sources),
            predicted=_predicted(choice.prefills, best, decision.predicted_ttft_s),
            prefill_s=float(weighed.prefill_s[best]),
            rank=choice.rank,
            uncached_tokens=place.num_prompt_tokens - reuse_blocks * layout.block_size,
            needed_blocks=needed_blocks,
        )

    def _reads(self, sources: Sequence[PrefixSource]) -> tuple[tuple[Instance, int], ...]:
        found = ((self._members.find(s.store.instance_id), s.num_blocks) for s in sources)
        return tuple((store, num_blocks) for store, num_blocks in found if store is not None)

    def _candidates(
        self, place: Place, excluded: Sequence[str]
    ) -> tuple[_Able[PrefillTable], _Able[DecodeTable], KvLayout]:
        """The instances that may serve a prompt, and the layout of its blocks."""
        members = self._members
        prefill_rows = _available(Role.PREFILL, members.prefills, excluded)
        decode_rows = _available(Role.DECODE, members.decodes, excluded)
        layout, tokens = self._check_prompt(place), place.num_prompt_tokens
        prefills, decodes = members.with_role(Role.PREFILL), members.with_role(Role.DECODE)
        return (
            _fitting(members.prefills, prefills, prefill_rows, layout.blocks_for(tokens)),
            _fitting(members.decodes, decodes, decode_rows, layout.blocks_for(tokens + 1)),
            layout,
        )

    def _decide(self, place: Place, choice: _Choice, now: float) -> Decision:
        """Admission, and the record of it all."""
        prefills, row = choice.prefills, choice.prefill
        chosen_ttft_s = float(prefills.ttft_s[row])
        ttft_s = chosen_ttft_s + max(choice.wait_s - float(prefills.queue_s[row]), 0.0)
        tbt_s = float(choice.decodes.tbt_s[choice.decode])
        ttft_slo_s = self._ttft_slo_s if place.ttft_slo_s is None else place.ttft_slo_s
        tbt_slo_s = self._tbt_slo_s if place.tbt_slo_s is None else place.tbt_slo_s
        rejection: Rejection | None = None
        if ttft_s > ttft_slo_s:
            rejection = reject_ttft(prefills, chosen_ttft_s, ttft_s, ttft_slo_s)
        elif tbt_s > tbt_slo_s:
            rejection = reject_tbt(
                choice.decode_instance, choice.decodes, choice.decode, tbt_slo_s, now
            )
        return Decision(
            request_id=place.request_id,
            decided_at=now,
            policy=self.policy.name,
            balancing_threshold=self.policy.balancing_threshold,
            num_prompt_tokens=place.num_prompt_tokens,
            best_blocks=choice.best_blocks,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
            excluded_instances=tuple(sorted(place.excluded_instances)),
            prefill_columns=prefills,
            decode_columns=choice.decodes,
            prefill=prefills.instance_id[row],
            decode=choice.decode_instance.instance_id,
            rank=choice.rank,
            sources=tuple(
                (s.store.instance_id, s.first_block, s.num_blocks) for s in choice.sources
            ),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=tbt_s,
            predicted_landing_wait_s=choice.wait_s,
            rejection=rejection,
        )

    def _check_prompt(self, place: Place) -> KvLayout:
        layout, limit = self._members.layout, self._members.max_model_len
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

    def _prompt(
        self,
        place: Place,
        keys: Sequence[BlockKey],
        leading: Leading,
        layout: KvLayout,
        best_blocks: int,
    ) -> Prompt:
        session = b""
        if self.policy.by_session:
            session = (
                first_distinguishing(keys, self._directory.children(leading.slots))
                if place.session_id is None
                else place.session_id.encode()
            )
        return Prompt(
            place.num_prompt_tokens,
            layout.block_size,
            best_blocks,
            place.request_id,
            session,
            self._ttft_slo_s if place.ttft_slo_s is None else place.ttft_slo_s,
        )


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
) -> _Able[T]:
    """Of those rows, the ones whose pools are large enough."""
    pools = table.num_blocks
    if rows is None:
        if pools[pools.argmin()] >= num_blocks:
            return _Able(table, instances)
        rows = np.arange(len(table))
    fitting = rows[pools[rows] >= num_blocks]
    if not fitting.size:
        raise InvalidRequest(
            f"the prompt needs {num_blocks} KV blocks and no {instances[0].role} instance has more "
            f"than {pools[rows].max()}",
            param="prompt",
        )
    return _Able(table.take(fitting), [instances[row] for row in fitting.tolist()])


def _offers(
    able: _Able[PrefillTable],
    prefixes: PrefixMap,
    stores: StoreTable,
    layout: KvLayout,
    now: float,
) -> Offers:
    prefills, instances = able.table, able.instances
    device_blocks, prefix_blocks = prefixes.own_blocks(prefills)
    local_s = layout.block_bytes / LOCAL_BYTES_PER_S
    sender = prefixes.best_store
    if sender is None:
        remote_s = np.zeros(len(prefills))
    else:
        rates = np.minimum(stores.bytes_per_s[sender], prefills.bytes_per_s)
        is_near = prefills.host == stores.host[sender]
        remote_s = np.where(is_near, local_s, layout.block_bytes / rates)
    return Offers(
        prefills.identity,
        prefills.chosen_at.copy(),  # the record outlives the table
        device_blocks,
        prefix_blocks,
        prefills.estimate_s(now),
        local_s,
        remote_s,
        prefills.c0,
        prefills.c1,
        prefills.c2,
        now,
        lambda row, rank: instances[row].queue.wait_s(now, rank),
        lambda row, rank: instances[row].queue.num_delayed(now, rank),
    )


def _record(prefills: PrefillTable, offers: Offers, weighed: Weighed) -> PrefillColumns:
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
        offers.chosen_at,
    )


def _predicted(prefills: PrefillColumns, row: int, ttft_s: float) -> Times:
    return Times(
        ttft_s=ttft_s,
        queue_s=float(prefills.queue_s[row]),
        transfer_s=float(prefills.load_s[row] + prefills.transfer_s[row]),
        prefill_s=float(prefills.prefill_s[row]),
    )
