"""Decides the placement of one request: candidates, their predictions, the choice. Pure and without side effects.

The prefill instance is the one with the best policy score of all instances that accept work. The decode instance is
chosen by `conductor.landing`, for the moment when the prompt will be prefilled. Waiting for landing blocks counts
towards TTFT. A request whose predictions exceed the SLO is rejected (`conductor.admission`). Ties go to the least
recently chosen instance. A decision takes a fixed number of numpy operations, whatever the number of instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from conductor.admission import (
    STEP_SHARE,
    Admission,
    caution,
    judged_tbt_s,
    reject_claimed,
    reject_tbt,
    reject_ttft,
)
from conductor.candidates import Able, eligible, offers_for, predicted_times, record
from conductor.columns import DecodeTable, PrefillTable
from conductor.cost.accuracy import Times
from conductor.decision import (
    Decision,
    DecodeColumns,
    PrefillColumns,
    Rejection,
    UndividedColumns,
)
from conductor.events import Place
from conductor.fairness.shares import Fairness
from conductor.fairness.turns import Queueing, offers_in_turn, queueing
from conductor.flights import Plan
from conductor.landing import Newcomer, best_decode, least, weigh_decodes
from conductor.learned import Learned
from conductor.limits import Limits
from conductor.members import Instance, Members
from conductor.policies.base import PlacementPolicy, Prompt, Weighed
from conductor.prefix import PrefixMap, first_distinguishing
from conductor.undivided import best_undivided, weigh_undivided
from kvstore.directory import Directory, Leading
from protocol.keys import BlockKey, pack_keys
from protocol.layout import KvLayout
from protocol.request import PrefixSource


class _Prefill(NamedTuple):
    """The chosen prefill instance."""

    instance: Instance
    columns: PrefillColumns
    row: int
    reuse_blocks: int
    sources: tuple[PrefixSource, ...]
    best_blocks: int
    rank: float
    queueing: Queueing
    prefixes: PrefixMap

    @property
    def ttft_s(self) -> float:
        return float(self.columns.ttft_s[self.row])


class _Decode(NamedTuple):
    """The chosen decode instance."""

    able: Able[DecodeTable]
    columns: DecodeColumns
    row: int
    wait_s: float  # until the instance has blocks for the prompt
    newcomer: Newcomer

    @property
    def instance(self) -> Instance:
        return self.able.instances[self.row]

    @property
    def foreseen_seqs(self) -> float:
        """Sequences already placed that are predicted to run when this one lands; overtaking ones not counted."""
        landing_seqs = float(self.columns.landing_seqs[self.row])
        return landing_seqs - 1.0 - self.newcomer.num_overtaking


class Planner:
    """Decides placements from the current members and prefix index."""

    def __init__(
        self,
        members: Members,
        directory: Directory,
        learned: Learned,
        fairness: Fairness,
        policy: PlacementPolicy,
        limits: Limits,
    ) -> None:
        self._members = members
        self._directory = directory
        self._learned = learned
        self._fairness = fairness
        self.policy = policy
        self._limits = limits

    def plan(self, place: Place, now: float) -> Plan:
        """Returns the plan for one request, which may be a rejection. Raises NoWorker if a role has no available
        instance, InvalidRequest if no instance could ever serve the prompt."""
        excluded = sorted(place.excluded_instances)
        prefills, decodes, layout = eligible(self._members, place, excluded)
        prefill = self._best_prefill(place, prefills, excluded, layout, now)
        decode = self._best_decode(place, decodes, layout, prefill.ttft_s, now)
        decision = self._decide(place, prefill, decode, now)
        plan = Plan(
            decision=decision,
            prefill=prefill.instance,
            decode=decode.instance,
            sources=prefill.sources,
            reads=self._reads(prefill.sources),
            predicted=predicted_times(prefill.columns, prefill.row, decision.predicted_ttft_s),
            prefill_s=float(prefill.columns.prefill_s[prefill.row]),
            rank=prefill.rank,
            queueing=prefill.queueing,
            uncached_tokens=place.num_prompt_tokens - prefill.reuse_blocks * layout.block_size,
            needed_blocks=decode.newcomer.needed_blocks,
            block_bytes=layout.block_bytes,
            step_s=float(decode.columns.landing_tbt_s[decode.row]),
            foreseen_seqs=decode.foreseen_seqs,
        )
        undivided = self._undivided(prefill, decode, decision, layout, now)
        if undivided is None:
            return plan
        sooner_than_s = decision.predicted_ttft_s - self._learned.overhead.request_s
        row = best_undivided(undivided, sooner_than_s=sooner_than_s)
        plan = plan._replace(decision=replace(decision, undivided_columns=undivided))
        if row is None:
            return plan
        return self._undivided_plan(plan, prefill, decode, undivided, row, layout, now)

    def _best_prefill(
        self,
        place: Place,
        able: Able[PrefillTable],
        excluded: Sequence[str],
        layout: KvLayout,
        now: float,
    ) -> _Prefill:
        # The last prompt token is always computed, because its logits give the first output token.
        usable = min(len(place.block_keys), (place.num_prompt_tokens - 1) // layout.block_size)
        keys = place.block_keys[:usable]
        leading = self._directory.leading(pack_keys(keys))
        prefixes = PrefixMap(leading, self._members, excluded)
        prompt = self._prompt(place, keys, leading, layout, prefixes.best_blocks)
        offers = offers_for(able, prefixes, layout, now)
        own = self._queueing(place, able.table, now)
        offers = offers_in_turn(offers, own, passes_others=self._passes_others(own))
        weighed = self.policy.weigh(prompt, offers)
        best = least(weighed.score, offers.chosen_at)
        instance, reuse_blocks = able.instances[best], int(weighed.reuse_blocks[best])
        return _Prefill(
            instance=instance,
            columns=record(able.table, offers, weighed),
            row=best,
            reuse_blocks=reuse_blocks,
            sources=prefixes.sources(instance, int(offers.device_blocks[best]), reuse_blocks),
            best_blocks=prefixes.best_blocks,
            rank=self._rank(own, instance, best, weighed),
            queueing=own,
            prefixes=prefixes,
        )

    def _rank(self, own: Queueing, instance: Instance, row: int, weighed: Weighed) -> float:
        given = 0.0 if weighed.rank is None else float(weighed.rank[row])
        return own.rank(row, given, lambda place: self._fairness.tie_s(place, own.priority, instance.link))

    def _queueing(self, place: Place, table: PrefillTable, now: float) -> Queueing:
        priority = place.priority if self._limits.by_priority else 0
        return queueing(self._fairness, place.tenant, priority, table.link, now)

    def _passes_others(self, own: Queueing) -> bool:
        return self._limits.by_priority and self._fairness.has_below(own.priority)

    def _best_decode(
        self, place: Place, able: Able[DecodeTable], layout: KvLayout, ttft_s: float, now: float
    ) -> _Decode:
        newcomer = Newcomer(
            num_prompt_tokens=place.num_prompt_tokens,
            needed_blocks=layout.blocks_for(place.num_prompt_tokens + 1),
            block_size=layout.block_size,
            expected_output=self._learned.lengths.expected(
                max_tokens=place.max_tokens,
                prompt_tokens=place.num_prompt_tokens,
                tenant=place.tenant,
            ),
            lands_at=now + ttft_s,
            num_overtaking=self._learned.overtaking.expected(ttft_s, caution(self._limits.admission)),
        )
        outlook = self._members.outlook
        outlook.advance(now)
        columns = weigh_decodes(able.table, outlook, newcomer, now)
        _, tbt_slo_s = self._limits.of(place)
        within = judged_tbt_s(self._limits.admission, columns) <= STEP_SHARE * tbt_slo_s
        row, wait_s = best_decode(columns, able.instances, within, layout.block_size, now)
        return _Decode(able, columns, row, wait_s, newcomer)

    # -- prefill on a decode instance

    def _undivided(
        self, prefill: _Prefill, decode: _Decode, decision: Decision, layout: KvLayout, now: float
    ) -> UndividedColumns | None:
        """Weighs all decode instances as candidates to prefill the prompt themselves; None if none may."""
        decodes = decode.able.table
        if not self._limits.conditional or not decodes.reads_prompts.any():
            return None
        device_blocks = prefill.prefixes.device_blocks(decodes)
        return weigh_undivided(
            decodes,
            decode.columns,
            device_blocks,
            prefill.prefixes.remote_s_per_block(decodes, device_blocks, layout.block_bytes, now),
            num_tokens=decision.num_prompt_tokens,
            block_size=layout.block_size,
            best_blocks=prefill.best_blocks,
            most_step_s=self._limits.chunk_share * self._limits.tbt_slo_s,
            most_tbt_s=STEP_SHARE * decision.tbt_slo_s,
            most_ttft_s=decision.ttft_slo_s - self._learned.overhead.request_s,
        )

    def _undivided_plan(
        self,
        divided: Plan,
        prefill: _Prefill,
        decode: _Decode,
        undivided: UndividedColumns,
        row: int,
        layout: KvLayout,
        now: float,
    ) -> Plan:
        """Returns `divided`, the plan with separate workers, changed so that the decode instance of `row` prefills."""
        instance, columns = decode.able.instances[row], decode.columns
        reuse_blocks = int(undivided.reuse_blocks[row])
        device_blocks = int(undivided.device_blocks[row])
        sources = prefill.prefixes.sources(instance, device_blocks, reuse_blocks)
        ttft_s = float(undivided.ttft_s[row]) + self._learned.overhead.request_s
        prefill_s = float(undivided.prefill_s[row])
        decision = replace(
            divided.decision,
            is_undivided=True,
            decode=instance.instance_id,
            rank=0.0,
            sources=_named(sources),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=float(judged_tbt_s(self._limits.admission, columns)[row]),
            predicted_landing_wait_s=0.0,
            rejection=self._claimed(prefill, now),
        )
        return divided._replace(
            decision=decision,
            prefill=instance,
            decode=instance,
            sources=sources,
            reads=self._reads(sources),
            predicted=Times(
                ttft_s=ttft_s,
                queue_s=float(undivided.queue_s[row]),
                transfer_s=float(undivided.load_s[row]),
                prefill_s=prefill_s,
            ),
            prefill_s=prefill_s,
            rank=0.0,
            uncached_tokens=decision.num_prompt_tokens - reuse_blocks * layout.block_size,
            step_s=float(columns.landing_tbt_s[row]),
            foreseen_seqs=decode._replace(row=row).foreseen_seqs,
        )

    def _reads(self, sources: Sequence[PrefixSource]) -> tuple[tuple[Instance, int], ...]:
        found = ((self._members.find(s.store.instance_id), s.num_blocks) for s in sources)
        return tuple((store, num_blocks) for store, num_blocks in found if store is not None)

    def _decide(self, place: Place, prefill: _Prefill, decode: _Decode, now: float) -> Decision:
        """Decides admission and makes the record of the decision."""
        queue_s = float(prefill.columns.queue_s[prefill.row])
        ttft_s = prefill.ttft_s + max(decode.wait_s - queue_s, 0.0)
        ttft_s += self._learned.overhead.seconds(queue_s)
        ttft_slo_s, tbt_slo_s = self._limits.of(place)
        admission = self._limits.admission
        return Decision(
            request_id=place.request_id,
            decided_at=now,
            policy=self.policy.name,
            balancing_threshold=self.policy.balancing_threshold,
            num_prompt_tokens=place.num_prompt_tokens,
            best_blocks=prefill.best_blocks,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
            excluded_instances=tuple(sorted(place.excluded_instances)),
            prefill_columns=prefill.columns,
            decode_columns=decode.columns,
            prefill=prefill.instance.instance_id,
            decode=decode.instance.instance_id,
            rank=prefill.rank,
            turn=prefill.queueing.turn,
            priority=place.priority,
            sources=_named(prefill.sources),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=float(judged_tbt_s(admission, decode.columns)[decode.row]),
            predicted_landing_wait_s=decode.wait_s,
            expected_output=decode.newcomer.expected_output,
            admission=admission.value,
            rejection=self._rejection(place, prefill, decode, ttft_s, now),
        )

    def _rejection(
        self, place: Place, prefill: _Prefill, decode: _Decode, ttft_s: float, now: float
    ) -> Rejection | None:
        admission = self._limits.admission
        if admission is Admission.NONE:
            return None
        ttft_slo_s, tbt_slo_s = self._limits.of(place)
        if ttft_s > ttft_slo_s:
            return reject_ttft(prefill.columns, prefill.ttft_s, ttft_s, ttft_slo_s)
        if float(judged_tbt_s(admission, decode.columns)[decode.row]) <= STEP_SHARE * tbt_slo_s:
            return self._claimed(prefill, now)
        newcomer, since, queue_s = decode.newcomer, decode.newcomer.lands_at, 0.0
        if admission is Admission.CURRENT:
            newcomer, since = newcomer._replace(num_overtaking=0.0), now
        else:
            queue_s = float(prefill.columns.queue_s[prefill.row])
        return reject_tbt(decode.able.table, self._members.outlook, newcomer, tbt_slo_s, since, queue_s)

    def _claimed(self, prefill: _Prefill, now: float) -> Rejection | None:
        """Returns the rejection of a request that meets both objectives if a tenant with less in flight has a claim."""
        if self._limits.admission is Admission.NONE:
            return None
        return reject_claimed(self._fairness.claimed_until(prefill.queueing.turn, now), now)

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
        ttft_slo_s, _ = self._limits.of(place)
        return Prompt(
            place.num_prompt_tokens,
            layout.block_size,
            best_blocks,
            place.request_id,
            session,
            ttft_slo_s,
        )


def _named(sources: Sequence[PrefixSource]) -> tuple[tuple[str, int, int], ...]:
    """Converts sources to the form that the decision record keeps."""
    return tuple((s.store.instance_id, s.first_block, s.num_blocks) for s in sources)
