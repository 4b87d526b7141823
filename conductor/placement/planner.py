"""Decides the placement of one request: candidates, their predictions, the choice. Pure and without side effects.

The prefill instance is the one with the best policy score of all instances that accept work. The decode instance is
chosen by `conductor.placement.decode_selection`, for the moment when the prompt will be prefilled. Waiting for landing
blocks counts towards TTFT. A request whose predictions exceed the SLO is rejected (`conductor.placement.admission`).
Ties go to the least recently chosen instance. A decision takes a fixed number of numpy operations, whatever the number
of instances.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moonserve.conductor.events import Place
from moonserve.conductor.members import Instance, Members
from moonserve.conductor.placement.admission import (
    STEP_SHARE,
    AdmissionMode,
    Limits,
    judged_tbt_s,
    overtaking_deviations,
    reject_claimed,
    reject_tbt,
    reject_ttft,
)
from moonserve.conductor.placement.candidates import (
    EligibleInstances,
    QueueTerms,
    find_eligible,
    predicted_times,
    prefill_candidates,
    prefill_columns,
    queue_terms,
    with_own_waits,
)
from moonserve.conductor.placement.conditional_disaggregation import best_local_prefill, score_local_prefill
from moonserve.conductor.placement.decision import (
    Decision,
    DecodeColumns,
    LocalPrefillColumns,
    PrefillColumns,
    Rejection,
)
from moonserve.conductor.placement.decode_selection import NewSequence, best_decode, lowest_score, score_decodes
from moonserve.conductor.placement.in_flight import PlacementPlan
from moonserve.conductor.placement.policies.base import PlacementPolicy, Prompt, Scores
from moonserve.conductor.placement.prefix_lookup import PrefixMap, conversation_block
from moonserve.conductor.placement.tenant_fairness import Fairness
from moonserve.conductor.prediction.accuracy import INTERVAL_SHARE, Times
from moonserve.conductor.prediction.instance_table import DecodeTable, PrefillTable
from moonserve.conductor.prediction.learned_estimates import LearnedEstimates
from moonserve.kvstore.directory import Directory, LeadingHolders
from moonserve.protocol.kv_blocks import BlockKey, KvLayout, pack_keys
from moonserve.protocol.request import PrefixSource


class _ChosenPrefill(NamedTuple):
    """The chosen prefill instance."""

    instance: Instance
    columns: PrefillColumns
    row: int
    reuse_blocks: int
    sources: tuple[PrefixSource, ...]
    best_blocks: int
    rank: float
    queueing: QueueTerms
    prefixes: PrefixMap

    @property
    def ttft_s(self) -> float:
        return float(self.columns.ttft_s[self.row])


class _ChosenDecode(NamedTuple):
    """The chosen decode instance."""

    able: EligibleInstances[DecodeTable]
    columns: DecodeColumns
    row: int
    wait_s: float  # until the instance has blocks for the prompt
    newcomer: NewSequence

    @property
    def instance(self) -> Instance:
        return self.able.instances[self.row]

    @property
    def predicted_seqs(self) -> float:
        """Sequences already placed that are predicted to run when this one lands; overtaking ones not counted."""
        landing_seqs = float(self.columns.landing_seqs[self.row])
        return landing_seqs - 1.0 - self.newcomer.num_overtaking


@dataclass(slots=True, eq=False)
class PlacementPlanner:
    """Decides placements from the current members and prefix index."""

    members: Members
    directory: Directory
    learned: LearnedEstimates
    fairness: Fairness
    policy: PlacementPolicy
    limits: Limits

    def plan(self, place: Place, now: float) -> PlacementPlan:
        """Returns the plan for one request, which may be a rejection. Raises NoWorker if a role has no available
        instance, InvalidRequest if no instance could ever serve the prompt."""
        excluded = sorted(place.excluded_instances)
        prefills, decodes, layout = find_eligible(self.members, place, excluded)
        prefill = self._best_prefill(place, prefills, excluded, layout, now)
        decode = self._best_decode(place, decodes, layout, prefill.ttft_s, now)
        decision = self._decide(place, prefill, decode, now)
        plan = PlacementPlan(
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
            predicted_seqs=decode.predicted_seqs,
        )
        local_prefill = self._score_local_prefill(prefill, decode, decision, layout, now)
        if local_prefill is None:
            return plan
        sooner_than_s = decision.predicted_ttft_s - self.learned.overhead.request_s
        row = best_local_prefill(local_prefill, sooner_than_s=sooner_than_s)
        plan = plan._replace(decision=replace(decision, undivided_columns=local_prefill))
        if row is None:
            return plan
        return self._local_prefill_plan(plan, prefill, decode, local_prefill, row, layout, now)

    def _best_prefill(
        self,
        place: Place,
        able: EligibleInstances[PrefillTable],
        excluded: Sequence[str],
        layout: KvLayout,
        now: float,
    ) -> _ChosenPrefill:
        # The last prompt token is always computed, because its logits give the first output token.
        usable = min(len(place.block_keys), (place.num_prompt_tokens - 1) // layout.block_size)
        keys = place.block_keys[:usable]
        leading = self.directory.leading(pack_keys(keys))
        prefixes = PrefixMap(leading, self.members, excluded)
        prompt = self._prompt(place, keys, leading, layout, prefixes.best_blocks)
        offers = prefill_candidates(able, prefixes, layout, now)
        priority = place.priority if self.limits.by_priority else 0
        own = queue_terms(self.fairness, place.tenant, priority, able.table.link, now)
        passes_others = self.limits.by_priority and self.fairness.has_below(own.priority)
        offers = with_own_waits(offers, own, passes_others=passes_others)
        weighed = self.policy.weigh(prompt, offers)
        best = lowest_score(weighed.score, offers.chosen_at)
        instance, reuse_blocks = able.instances[best], int(weighed.reuse_blocks[best])
        return _ChosenPrefill(
            instance=instance,
            columns=prefill_columns(able.table, offers, weighed),
            row=best,
            reuse_blocks=reuse_blocks,
            sources=prefixes.sources(instance, int(offers.device_blocks[best]), reuse_blocks),
            best_blocks=prefixes.best_blocks,
            rank=self._rank(own, instance, best, weighed),
            queueing=own,
            prefixes=prefixes,
        )

    def _rank(self, own: QueueTerms, instance: Instance, row: int, weighed: Scores) -> float:
        given = 0.0 if weighed.rank is None else float(weighed.rank[row])
        return own.rank(row, given, lambda place: self.fairness.tie_s(place, own.priority, instance.link))

    def _best_decode(
        self, place: Place, able: EligibleInstances[DecodeTable], layout: KvLayout, ttft_s: float, now: float
    ) -> _ChosenDecode:
        newcomer = NewSequence(
            num_prompt_tokens=place.num_prompt_tokens,
            needed_blocks=layout.blocks_for(place.num_prompt_tokens + 1),
            block_size=layout.block_size,
            expected_output=self.learned.lengths.expected(
                max_tokens=place.max_tokens,
                prompt_tokens=place.num_prompt_tokens,
                tenant=place.tenant,
            ),
            lands_at=now + ttft_s,
            num_overtaking=self.learned.overtaking.expected(ttft_s, overtaking_deviations(self.limits.admission)),
        )
        outlook = self.members.decode_forecast
        outlook.advance(now)
        columns = score_decodes(able.table, outlook, newcomer, now)
        _, tbt_slo_s = self.limits.objectives(place)
        within = judged_tbt_s(self.limits.admission, columns) <= STEP_SHARE * tbt_slo_s
        row, wait_s = best_decode(columns, able.instances, within, layout.block_size, now)
        return _ChosenDecode(able, columns, row, wait_s, newcomer)

    # -- prefill on a decode instance

    def _score_local_prefill(
        self, prefill: _ChosenPrefill, decode: _ChosenDecode, decision: Decision, layout: KvLayout, now: float
    ) -> LocalPrefillColumns | None:
        """Weighs all decode instances as candidates to prefill the prompt themselves; None if none may."""
        decodes = decode.able.table
        if not self.limits.conditional_disaggregation or not decodes.reads_prompts.any():
            return None
        device_blocks = prefill.prefixes.device_blocks(decodes)
        return score_local_prefill(
            decodes,
            decode.columns,
            device_blocks,
            prefill.prefixes.remote_s_per_block(decodes, device_blocks, layout.block_bytes, now),
            num_tokens=decision.num_prompt_tokens,
            block_size=layout.block_size,
            best_blocks=prefill.best_blocks,
            most_step_s=self.limits.chunk_share * self.limits.tbt_slo_s,
            most_tbt_s=STEP_SHARE * decision.tbt_slo_s,
            most_ttft_s=decision.ttft_slo_s - self.learned.overhead.request_s,
        )

    def _local_prefill_plan(
        self,
        divided: PlacementPlan,
        prefill: _ChosenPrefill,
        decode: _ChosenDecode,
        local_prefill: LocalPrefillColumns,
        row: int,
        layout: KvLayout,
        now: float,
    ) -> PlacementPlan:
        """Returns `divided`, the plan with separate workers, changed so that the decode instance of `row` prefills."""
        instance, columns = decode.able.instances[row], decode.columns
        reuse_blocks = int(local_prefill.reuse_blocks[row])
        device_blocks = int(local_prefill.device_blocks[row])
        sources = prefill.prefixes.sources(instance, device_blocks, reuse_blocks)
        ttft_s = float(local_prefill.ttft_s[row]) + self.learned.overhead.request_s
        prefill_s = float(local_prefill.prefill_s[row])
        tbt_s = float(judged_tbt_s(self.limits.admission, columns)[row])
        decision = replace(
            divided.decision,
            is_undivided=True,
            decode=instance.instance_id,
            rank=0.0,
            sources=_named(sources),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=tbt_s,
            tbt_range_s=self.learned.tbt.around(tbt_s),
            predicted_landing_wait_s=0.0,
            rejection=self._reject_if_claimed(prefill, now),
        )
        return divided._replace(
            decision=decision,
            prefill=instance,
            decode=instance,
            sources=sources,
            reads=self._reads(sources),
            predicted=Times(
                ttft_s=ttft_s,
                queue_s=float(local_prefill.queue_s[row]),
                transfer_s=float(local_prefill.load_s[row]),
                prefill_s=prefill_s,
            ),
            prefill_s=prefill_s,
            rank=0.0,
            uncached_tokens=decision.num_prompt_tokens - reuse_blocks * layout.block_size,
            step_s=float(columns.landing_tbt_s[row]),
            predicted_seqs=decode._replace(row=row).predicted_seqs,
        )

    def _reads(self, sources: Sequence[PrefixSource]) -> tuple[tuple[Instance, int], ...]:
        found = ((self.members.find(s.store.instance_id), s.num_blocks) for s in sources)
        return tuple((store, num_blocks) for store, num_blocks in found if store is not None)

    def _decide(self, place: Place, prefill: _ChosenPrefill, decode: _ChosenDecode, now: float) -> Decision:
        """Decides admission and makes the record of the decision."""
        queue_s = float(prefill.columns.queue_s[prefill.row])
        ttft_s = prefill.ttft_s + max(decode.wait_s - queue_s, 0.0)
        ttft_s += self.learned.overhead.seconds(queue_s)
        ttft_slo_s, tbt_slo_s = self.limits.objectives(place)
        admission = self.limits.admission
        tbt_s = float(judged_tbt_s(admission, decode.columns)[decode.row])
        return Decision(
            request_id=place.request_id,
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
            turn=prefill.queueing.standing,
            priority=place.priority,
            expected_return=place.expected_return,
            sources=_named(prefill.sources),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=tbt_s,
            predicted_landing_wait_s=decode.wait_s,
            expected_output=decode.newcomer.expected_output,
            tbt_range_s=self.learned.tbt.around(tbt_s),
            output_range=self.learned.lengths.interval(
                INTERVAL_SHARE,
                max_tokens=place.max_tokens,
                prompt_tokens=place.num_prompt_tokens,
                tenant=place.tenant,
            ),
            admission=admission.value,
            rejection=self._rejection(place, prefill, decode, ttft_s, now),
        )

    def _rejection(
        self, place: Place, prefill: _ChosenPrefill, decode: _ChosenDecode, ttft_s: float, now: float
    ) -> Rejection | None:
        admission = self.limits.admission
        if admission is AdmissionMode.NONE:
            return None
        ttft_slo_s, tbt_slo_s = self.limits.objectives(place)
        if ttft_s > ttft_slo_s:
            return reject_ttft(prefill.columns, prefill.ttft_s, ttft_s, ttft_slo_s)
        if float(judged_tbt_s(admission, decode.columns)[decode.row]) <= STEP_SHARE * tbt_slo_s:
            return self._reject_if_claimed(prefill, now)
        newcomer, since, queue_s = decode.newcomer, decode.newcomer.lands_at, 0.0
        if admission is AdmissionMode.CURRENT:
            newcomer, since = newcomer._replace(num_overtaking=0.0), now
        else:
            queue_s = float(prefill.columns.queue_s[prefill.row])
        return reject_tbt(decode.able.table, self.members.decode_forecast, newcomer, tbt_slo_s, since, queue_s)

    def _reject_if_claimed(self, prefill: _ChosenPrefill, now: float) -> Rejection | None:
        """Returns the rejection of a request that meets both objectives if a tenant with less in flight has a claim."""
        if self.limits.admission is AdmissionMode.NONE:
            return None
        return reject_claimed(self.fairness.claimed_until(prefill.queueing.standing, now), now)

    def _prompt(
        self,
        place: Place,
        keys: Sequence[BlockKey],
        leading: LeadingHolders,
        layout: KvLayout,
        best_blocks: int,
    ) -> Prompt:
        session = b""
        if self.policy.by_session:
            session = (
                conversation_block(keys, self.directory.children(leading.slots))
                if place.session_id is None
                else place.session_id.encode()
            )
        ttft_slo_s, _ = self.limits.objectives(place)
        rejects, num_tokens = self.limits.admission is not AdmissionMode.NONE, place.num_prompt_tokens
        return Prompt(num_tokens, layout.block_size, best_blocks, place.request_id, session, ttft_slo_s, rejects)


def _named(sources: Sequence[PrefixSource]) -> tuple[tuple[str, int, int], ...]:
    """Converts sources to the form that the decision record keeps."""
    return tuple((s.store.instance_id, s.first_block, s.num_blocks) for s in sources)
