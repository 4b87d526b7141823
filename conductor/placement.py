"""Deciding one request: candidates, their predictions, the choice, admission. Pure and without side effects.

Prefill: the policy's score. Decode: among instances with blocks for the prompt the smallest predicted TBT with this
request added, instances with a free sequence slot first; when none has the blocks, the one that will have them
soonest, and the waiting counts towards TTFT. Equal candidates: least recently chosen first.
Admission: predicted TTFT and TBT within the SLO, else a rejection that says when queues will have drained enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conductor.cost.transfer import DEFAULT_BYTES_PER_S, LOCAL_BYTES_PER_S
from conductor.decision import Decision, DecodeCandidate, PrefillCandidate, Rejection
from conductor.events import Place
from conductor.members import Instance, Members
from conductor.policies.base import Offer, PlacementPolicy, Prompt
from conductor.prefix import PrefixMap
from kvstore.directory import Directory
from protocol.errors import InvalidRequest, NoWorker
from protocol.ids import Role
from protocol.layout import KvLayout
from protocol.request import PrefixSource

# A client that comes back sooner finds the same queues.
MIN_RETRY_AFTER_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decision with the instances it names."""

    decision: Decision
    prefill: Instance
    decode: Instance
    sources: tuple[PrefixSource, ...]
    prefill_s: float  # predicted service time
    uncached_tokens: int
    needed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The best of each role, before admission."""

    prefill: PrefillCandidate
    prefill_candidates: Sequence[PrefillCandidate]
    decode: DecodeCandidate
    decode_candidates: Sequence[DecodeCandidate]
    decode_instance: Instance
    wait_s: float
    sources: tuple[PrefixSource, ...]
    best_blocks: int


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
        self._policy = policy
        self._ttft_slo_s = ttft_slo_s
        self._tbt_slo_s = tbt_slo_s

    def plan(self, place: Place, now: float) -> Plan:
        """Raises NoWorker when a role has no instance left, InvalidRequest when none could ever serve the prompt."""
        prefills = self._available(Role.PREFILL, place.excluded_instances)
        decodes = self._available(Role.DECODE, place.excluded_instances)
        layout = self._check_prompt(place)
        prompt_blocks = layout.blocks_for(place.num_prompt_tokens)
        needed_blocks = layout.blocks_for(place.num_prompt_tokens + 1)
        prefills = _large_enough(prefills, prompt_blocks)
        decodes = _large_enough(decodes, needed_blocks)

        # The last prompt token is always computed: its logits are the first token.
        usable = min(len(place.block_keys), (place.num_prompt_tokens - 1) // layout.block_size)
        prefixes = PrefixMap(
            self._directory, self._members, place.block_keys[:usable], place.excluded_instances
        )
        prefill_candidates = self._weigh_prefills(place, prefills, prefixes, layout, now)
        decode_candidates = _weigh_decodes(decodes, place.num_prompt_tokens, needed_blocks)
        best = self._best_prefill(prefill_candidates)
        landing, wait_s = _best_decode(decodes, decode_candidates, now)
        chosen = prefill_candidates[best]
        sources = prefixes.sources(prefills[best], chosen.device_blocks, chosen.reuse_blocks)
        choice = _Choice(
            prefill=chosen,
            prefill_candidates=prefill_candidates,
            decode=decode_candidates[landing],
            decode_candidates=decode_candidates,
            decode_instance=decodes[landing],
            wait_s=wait_s,
            sources=sources,
            best_blocks=prefixes.best_blocks,
        )
        return Plan(
            decision=self._decide(place, choice, now),
            prefill=prefills[best],
            decode=decodes[landing],
            sources=sources,
            prefill_s=chosen.prefill_s,
            uncached_tokens=place.num_prompt_tokens - chosen.reuse_blocks * layout.block_size,
            needed_blocks=needed_blocks,
        )

    def _decide(self, place: Place, choice: _Choice, now: float) -> Decision:
        """Admission, and the record of it all."""
        prefill, decode = choice.prefill, choice.decode
        ttft_s = prefill.ttft_s + max(choice.wait_s - prefill.queue_s, 0.0)
        ttft_slo_s = self._ttft_slo_s if place.ttft_slo_s is None else place.ttft_slo_s
        tbt_slo_s = self._tbt_slo_s if place.tbt_slo_s is None else place.tbt_slo_s
        rejection = None
        if ttft_s > ttft_slo_s:
            rejection = _reject_ttft(choice.prefill_candidates, prefill, ttft_s, ttft_slo_s)
        elif decode.tbt_s > tbt_slo_s:
            rejection = _reject_tbt(choice.decode_instance, decode, tbt_slo_s, now)
        return Decision(
            request_id=place.request_id,
            decided_at=now,
            policy=self._policy.name,
            balancing_threshold=self._policy.balancing_threshold,
            num_prompt_tokens=place.num_prompt_tokens,
            best_blocks=choice.best_blocks,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
            excluded_instances=tuple(sorted(place.excluded_instances)),
            prefill_candidates=tuple(choice.prefill_candidates),
            decode_candidates=tuple(choice.decode_candidates),
            prefill=prefill.instance_id,
            decode=decode.instance_id,
            sources=tuple(
                (s.store.instance_id, s.first_block, s.num_blocks) for s in choice.sources
            ),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=decode.tbt_s,
            predicted_landing_wait_s=choice.wait_s,
            rejection=rejection,
        )

    def _available(self, role: Role, excluded: frozenset[str]) -> list[Instance]:
        instances = self._members.with_role(role)
        available = [i for i in instances if not i.draining and i.instance_id not in excluded]
        if not available:
            state = "draining or excluded" if instances else "alive"
            verb = "every" if instances else "no"
            raise NoWorker(f"{verb} {role} instance is {state}")
        return available

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

    def _weigh_prefills(
        self,
        place: Place,
        instances: Sequence[Instance],
        prefixes: PrefixMap,
        layout: KvLayout,
        now: float,
    ) -> list[PrefillCandidate]:
        prompt = Prompt(place.num_prompt_tokens, layout.block_size, prefixes.best_blocks)
        block_bytes = layout.block_bytes
        local_s = block_bytes / LOCAL_BYTES_PER_S
        sender = prefixes.best_store
        sender_host = sender.endpoint.host if sender is not None else None
        sender_rate = _rate(sender) if sender is not None else DEFAULT_BYTES_PER_S
        candidates = []
        for instance in instances:
            device_blocks, prefix_blocks = prefixes.own_blocks(instance)
            near = instance.endpoint.host == sender_host
            offer = Offer(
                instance.instance_id,
                device_blocks,
                prefix_blocks,
                instance.queue.estimate_s(now),
                local_s,
                local_s if near else block_bytes / min(sender_rate, _rate(instance)),
                instance.registration.prefill_profile,
                instance.chosen_at,
            )
            candidates.append(self._policy.weigh(prompt, offer))
        return candidates

    def _best_prefill(self, candidates: Sequence[PrefillCandidate]) -> int:
        score = self._policy.score
        return min(
            range(len(candidates)), key=lambda i: (score(candidates[i]), candidates[i].chosen_at)
        )


def _large_enough(instances: Sequence[Instance], num_blocks: int) -> list[Instance]:
    fitting = [i for i in instances if i.registration.num_blocks >= num_blocks]
    if not fitting:
        largest = max(i.registration.num_blocks for i in instances)
        raise InvalidRequest(
            f"the prompt needs {num_blocks} KV blocks and no {instances[0].role} instance has more "
            f"than {largest}",
            param="prompt",
        )
    return fitting


def _rate(instance: Instance) -> float:
    return instance.registration.bytes_per_s or DEFAULT_BYTES_PER_S


def _weigh_decodes(
    instances: Sequence[Instance], num_prompt_tokens: int, needed_blocks: int
) -> list[DecodeCandidate]:
    candidates = []
    for instance in instances:
        registration, book = instance.registration, instance.decode
        num_seqs = book.num_seqs + 1
        context_tokens = book.context_tokens + num_prompt_tokens
        slots = registration.max_num_seqs
        candidates.append(
            DecodeCandidate(
                instance.instance_id,
                num_seqs,
                context_tokens,
                book.free_blocks,
                needed_blocks,
                not 0 < slots < num_seqs,
                registration.decode_profile.batch_step_s(num_seqs, context_tokens, slots),
                instance.chosen_at,
            )
        )
    return candidates


def _best_decode(
    instances: Sequence[Instance], candidates: Sequence[DecodeCandidate], now: float
) -> tuple[int, float]:
    """Index of the best candidate, and seconds until it has blocks for the prompt."""
    fitting = [i for i, candidate in enumerate(candidates) if candidate.fits]
    if fitting:
        best = min(
            fitting,
            key=lambda i: (
                not candidates[i].has_slot,
                candidates[i].tbt_s,
                candidates[i].chosen_at,
            ),
        )
        return best, 0.0
    waits = [_landing_wait_s(i, c, now) for i, c in zip(instances, candidates, strict=True)]
    best = min(range(len(waits)), key=lambda i: (waits[i], candidates[i].chosen_at))
    return best, waits[best]


def _landing_wait_s(instance: Instance, candidate: DecodeCandidate, now: float) -> float:
    """Seconds until expected ends of sequences have freed the missing blocks."""
    missing = candidate.needed_blocks - candidate.free_blocks
    ends = instance.decode.drain(candidate.tbt_s, now)
    for end_s, _, blocks in ends:
        missing -= blocks
        if missing <= 0:
            return end_s
    return ends[-1][0] if ends else candidate.tbt_s  # sequences that another conductor placed


def _reject_ttft(
    candidates: Sequence[PrefillCandidate],
    chosen: PrefillCandidate,
    ttft_s: float,
    slo_s: float,
) -> Rejection:
    if chosen.ttft_s <= slo_s:  # the landing blocks are what takes too long
        return Rejection(reason="landing_blocks", retry_after_s=_at_least(ttft_s - slo_s))
    # Queues drain by one second per second, so an instance meets the SLO once its excess is worked off.
    drains = [c.ttft_s - slo_s for c in candidates if c.ttft_s - c.queue_s <= slo_s]
    if drains:
        return Rejection(reason="ttft_slo", retry_after_s=_at_least(min(drains)))
    # Even an idle instance is too slow. Blocks cached until then may change that.
    return Rejection(reason="ttft_slo_unreachable", retry_after_s=_at_least(chosen.ttft_s))


def _reject_tbt(
    instance: Instance, candidate: DecodeCandidate, slo_s: float, now: float
) -> Rejection:
    """Retry once enough sequences are expected to have ended for this one to fit within the SLO."""
    registration = instance.registration
    num_seqs, context_tokens = candidate.num_seqs, candidate.context_tokens
    ends = instance.decode.drain(candidate.tbt_s, now)
    for end_s, tokens, _ in ends:
        num_seqs, context_tokens = max(num_seqs - 1, 1), max(context_tokens - tokens, 0)
        tbt_s = registration.decode_profile.batch_step_s(
            num_seqs, context_tokens, registration.max_num_seqs
        )
        if tbt_s <= slo_s:
            return Rejection(reason="tbt_slo", retry_after_s=_at_least(end_s))
    last_s = ends[-1][0] if ends else candidate.tbt_s
    return Rejection(reason="tbt_slo", retry_after_s=_at_least(last_s))


def _at_least(seconds: float) -> float:
    return max(seconds, MIN_RETRY_AFTER_S)
