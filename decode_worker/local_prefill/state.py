"""`LocalPrefillState`: state machine of a decode worker that also prefills the prompts of requests. Pure.

    WAITING (no blocks) → LOADING (its prefix is read) → READING (a sequence; chunks next to decode) → first token

Prompts get blocks in order of arrival, before new landings, and only while no preempted sequence waits for its own.
From then on a prompt is a sequence like one that was preempted: the schedule computes the missing tokens in chunks,
within the budget. Computed blocks are sealed and published one by one, so that later prompts share them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.admission_and_preemption import Prospect
from moonserve.decode_worker.decisions.events import Fail
from moonserve.decode_worker.decisions.limits_and_counters import Limits
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.decode_worker.decisions.sequence import Sequence, SequencePhase
from moonserve.decode_worker.local_prefill.publishing import BlockPublisher, NewBlock, PutEnded, Sealed
from moonserve.decode_worker.state import DecodeState
from moonserve.engine.admission_policy import AdmissionPolicy, BlockHolder
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions.events import LoadPrefix, PrefixLoaded, PrefixLoadFailed, PrefixPart
from moonserve.prefill_worker.decisions.load_or_compute import LoadChoice
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest, MoonserveError, NoWorker
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.protocol.request import BlockId, Endpoint, PrefillReport, PrefixSource, Request, RequestId
from moonserve.worker.events import Action, Event, Submitted


@dataclass(slots=True, eq=False, kw_only=True)
class _Prompt:
    """A prompt until its first token."""

    request: Request
    sources: tuple[PrefixSource, ...]
    submitted_at: float
    deadline_at: float
    blocks: list[BlockId] = field(default_factory=list)  # LOADING
    num_found: int = 0  # LOADING: leading blocks that were in the pool

    is_dropped: bool = False  # LOADING: dropped; its blocks are freed when nothing is read into them any more
    admitted_at: float | None = None  # LOADING, READING
    loaded_at: float = 0.0  # READING
    began_at: float | None = None  # READING: its first chunk
    sequence: Sequence | None = None  # READING
    num_cached: int = 0  # READING: blocks that were not computed
    num_sealed: int = 0  # READING: blocks

    @property
    def prospect(self) -> Prospect:
        request = self.request
        return Prospect(
            request_id=request.request_id,
            tenant=request.tenant,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            num_tokens=len(request.token_ids),
            rank=(request.priority, 0),
        )

    @property
    def store(self) -> Endpoint | None:
        """Store for its new blocks; None = the home store."""
        return self.sources[-1].store if self.sources else None


class LocalPrefillState(DecodeState):
    """State of the worker. It also handles the events of `decode_worker.local_prefill.publishing`."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        publishing: BlockPublisher | None = None,
        policy: AdmissionPolicy | None = None,
        offload_costs: OffloadCosts | None = None,
    ) -> None:
        super().__init__(pool, limits, policy, offload_costs)
        self._limits = limits
        self.publishing = publishing or BlockPublisher(pool)
        self._prompts: dict[RequestId, _Prompt] = {}  # without dropped ones, in order of arrival
        self._loading: dict[RequestId, _Prompt] = {}  # including dropped ones
        self._handlers = {
            **self._handlers,
            Submitted: self._submitted,
            PrefixLoaded: lambda event, now, out: self._loaded(event.request_id, event.checksums, now, out),
            PrefixLoadFailed: lambda event, now, out: self._loaded(event.request_id, (), now, out),
            Sealed: lambda event, now, out: self.publishing.on_sealed(event),
            PutEnded: lambda event, now, out: self.publishing.on_put_ended(event),
            events.StoreFound: self._home_found,
        }

    # -- figures

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (self._prompts or self._loading) and self.publishing.is_idle

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + sum(p.sequence is None for p in self._prompts.values())

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that are computed before a prompt that arrives now."""
        return sum(
            len(p.request.token_ids) if p.sequence is None else p.sequence.num_missing for p in self._prompts.values()
        )

    def report(self, request_id: RequestId, now: float) -> PrefillReport | None:
        """Returns the report for a prompt's first token, once; None for sequences that were prefilled elsewhere."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None or prompt.began_at is None:
            return None
        scores = None if prompt.sequence is None else prompt.sequence.scores
        load_s = prompt.loaded_at - (prompt.admitted_at or prompt.loaded_at)
        return PrefillReport(
            request_id=request_id,
            cached_tokens=prompt.num_cached * self._limits.block_size,
            queue_s=max(prompt.began_at - prompt.submitted_at - load_s, 0.0),
            load_s=load_s,
            compute_s=now - prompt.began_at,
            prompt_logprobs=scores.result() if scores is not None else None,
        )

    def counter_values(self) -> dict[str, int]:
        return {**super().counter_values(), **self.publishing.counters}

    def on_evicted(self, key: BlockKey) -> None:
        self.publishing.on_evicted(key)

    # -- events

    def handle(self, event: Event, now: float) -> list[Action]:
        out: list[Action] = super().handle(event, now)
        for prompt in list(self._prompts.values()):
            if prompt.sequence is not None:
                self._seal_computed(prompt, prompt.sequence, now, out)
        out += self.publishing.due_puts()
        return out

    def _submitted(self, event: Submitted, now: float, out: list[Action]) -> None:
        request, sources = event.request, event.placement.prefix_sources
        if self._tombstones.pop(request.request_id, now):
            return  # its gateway has cancelled it
        if sources:
            self.publishing.on_store_found(sources[-1].store)
        self._tombstones.remember_request(request.request_id, now)
        self._drop_prompt(request.request_id)  # an earlier attempt
        self._scheduler.cancel(request.request_id)
        deadline_at = now + request.timeout_s
        prompt = _Prompt(request=request, sources=sources, submitted_at=now, deadline_at=deadline_at)
        num_tokens = len(request.token_ids)
        if self._draining:
            self._refuse(prompt, NoWorker("this decode worker is draining"), out)
        elif self._limits.blocks_for(num_tokens) > self.pool.capacity:
            self._refuse(prompt, InvalidRequest(f"{num_tokens} tokens do not fit here"), out)
        else:
            self._prompts[request.request_id] = prompt
            self._alarms.schedule(deadline_at, self._time_out, request.request_id)

    def _home_found(self, event: events.StoreFound, now: float, out: list[Action]) -> None:
        self._offloading.on_store_found(event)
        self.publishing.on_home_found(event.store)

    def _loaded(self, request_id: RequestId, checksums: tuple[int, ...], now: float, out: list[Action]) -> None:
        """Ends a load. `checksums`: of the blocks that arrived after those found here; no other is written any more."""
        prompt = self._loading.pop(request_id)
        if prompt.is_dropped:
            self.pool.release(prompt.blocks)
            return
        keys = prompt.request.block_keys
        for index, checksum in enumerate(checksums, prompt.num_found):
            parent = keys[index - 1] if index else NO_PARENT
            self.pool.publish(prompt.blocks[index], keys[index], parent, checksum)
        self._begin_prefill(prompt, prompt.num_found + len(checksums), now)

    def _cancel(self, event: events.RequestCancelled, now: float, out: list[Action]) -> None:
        if not self._drop_prompt(event.request_id):
            super()._cancel(event, now, out)

    def _lose_gateway(self, event: events.GatewayLost, now: float, out: list[Action]) -> None:
        for prompt in list(self._prompts.values()):
            if prompt.request.gateway_id == event.gateway_id:
                self._drop_prompt(prompt.request.request_id)
        super()._lose_gateway(event, now, out)

    def _stop(self, event: events.Stopped, now: float, out: list[Action]) -> None:
        for prompt in [p for p in self._prompts.values() if p.sequence is None]:
            self._drop_prompt(prompt.request.request_id)
            self._refuse(prompt, NoWorker("the decode worker is stopping"), out)
        super()._stop(event, now, out)

    def _time_out(self, request_id: RequestId, now: float, out: list[Action]) -> None:
        """Fails a prompt that has not begun by its deadline."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.sequence is None and prompt.deadline_at <= now:
            self._drop_prompt(request_id)
            timeout_s = prompt.request.timeout_s
            self._refuse(prompt, DeadlineExceeded(f"not begun within {timeout_s:g} s"), out)

    def _refuse(self, prompt: _Prompt, error: MoonserveError, out: list[Action]) -> None:
        request = prompt.request
        self.counters.requests_failed += 1
        out.append(Fail(gateway_id=request.gateway_id, request_id=request.request_id, error=error))

    def _drop_prompt(self, request_id: RequestId) -> bool:
        """Drops a prompt. Returns False if there is none or it is a sequence: then the schedule must be notified."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None or prompt.sequence is not None:
            return False
        prompt.is_dropped = True
        return True

    # -- after every event

    def _advance(self, now: float, out: list[Action]) -> None:
        self._admit_prompts(now, out)
        super()._advance(now, out)

    @property
    def _may_grant_reservations(self) -> bool:
        """False while a prompt waits for blocks, because it goes before landings that would take them."""
        return not any(self._is_waiting(p) for p in self._prompts.values())

    def _is_waiting(self, prompt: _Prompt) -> bool:
        return prompt.admitted_at is None

    def _admit_prompts(self, now: float, out: list[Action]) -> None:
        if self._scheduler.has_preempted:
            return
        for prompt in [p for p in self._prompts.values() if self._is_waiting(p)]:
            num_tokens = len(prompt.request.token_ids)
            if self._limits.blocks_for(num_tokens) > self.pool.capacity:  # it may have shrunk
                self._drop_prompt(prompt.request.request_id)
                self._refuse(prompt, InvalidRequest(f"{num_tokens} tokens do not fit here"), out)
                continue
            # The blocks of an earlier attempt are written until its load has ended.
            if prompt.request.request_id in self._loading or not self._take_blocks(prompt):
                return
            self._admit(prompt, now, out)

    def _take_blocks(self, prompt: _Prompt) -> bool:
        """Takes cached blocks, and fresh ones for the rest. Returns False if admission does not allow it."""
        request = prompt.request
        num_tokens = len(request.token_ids)
        usable = (num_tokens - 1) // self._limits.block_size  # the last token is always computed
        keys = () if request.scores_prompt else request.block_keys[:usable]
        blocks = self._admission.admit(prompt.prospect, keys, self._limits.blocks_for(num_tokens))
        if blocks is None:
            return False
        found, fresh = blocks
        prompt.blocks, prompt.num_found = found + fresh, len(found)
        return True

    def _admit(self, prompt: _Prompt, now: float, out: list[Action]) -> None:
        prompt.admitted_at = now
        parts = self._parts(prompt)
        if not parts:
            self._begin_prefill(prompt, prompt.num_found, now)
            return
        request_id = prompt.request.request_id
        self._loading[request_id] = prompt
        choice = LoadChoice(num_parts=len(parts), part_s=(), totals_s=())
        out.append(LoadPrefix(request_id=request_id, parts=parts, choice=choice))

    def _parts(self, prompt: _Prompt) -> tuple[PrefixPart, ...]:
        """Returns the parts of the prefix that sources hold after the blocks found here, without a gap."""
        if prompt.request.scores_prompt:
            return ()
        keys, blocks = prompt.request.block_keys, prompt.blocks
        usable = (len(prompt.request.token_ids) - 1) // self._limits.block_size
        parts: list[PrefixPart] = []
        position = prompt.num_found
        for source in prompt.sources:
            end = min(source.first_block + source.num_blocks, usable)
            if source.first_block > position:
                break
            if end > position:
                part = (keys[position:end], tuple(blocks[position:end]))
                parts.append(PrefixPart(store=source.store, keys=part[0], blocks=part[1]))
                position = end
        return tuple(parts)

    def _begin_prefill(self, prompt: _Prompt, num_cached: int, now: float) -> None:
        """Makes the prompt a sequence. Its leading blocks are present; the schedule computes the others."""
        prompt.loaded_at = now
        prompt.num_cached = prompt.num_sealed = num_cached
        prompt.sequence = self._scheduler.add(
            prompt.request,
            prompt.blocks,
            prompt.deadline_at,
            num_computed=num_cached * self._limits.block_size,
        )
        prompt.blocks = []

    def _seal_computed(self, prompt: _Prompt, sequence: Sequence, now: float, out: list[Action]) -> None:
        """Seals the blocks that have been computed, and notes when the first chunk begins."""
        if sequence.phase is SequencePhase.ENDED and sequence.is_new:
            self._prompts.pop(prompt.request.request_id, None)
            return
        if prompt.began_at is None and self._scheduler.is_in_step(sequence):
            prompt.began_at = now
        keys = prompt.request.block_keys
        full = min(len(keys), sequence.slice.start // self._limits.block_size)
        hints = prompt.request.cache_hints
        if full > prompt.num_sealed and len(sequence.block_table) >= full and hints.store:
            items = [
                NewBlock(sequence.block_table[i], keys[i], keys[i - 1] if i else None, hints.without_return())
                for i in range(prompt.num_sealed, full)
            ]
            if full == len(keys):
                items[-1] = items[-1]._replace(hints=hints)
            prompt.num_sealed = full
            out.append(self.publishing.seal(items, prompt.store))

    def _claims(self) -> Iterator[BlockHolder]:
        yield from super()._claims()
        for prompt in self._loading.values():
            if not prompt.is_dropped:
                yield BlockHolder(prompt.prospect, prompt.blocks)

    # -- proof

    def _other_references(self) -> Counter[int]:
        references = super()._other_references()
        for prompt in self._loading.values():
            references.update(prompt.blocks)
        for blocks in self.publishing.held_blocks():
            references.update(blocks)
        return references

    def validate(self) -> None:
        super().validate()
        self.publishing.validate()
        for request_id, prompt in self._loading.items():
            assert prompt.blocks, f"{request_id} loads into nothing"
            assert prompt.is_dropped == (self._prompts.get(request_id) is not prompt)
        for request_id, prompt in self._prompts.items():
            stages = (self._is_waiting(prompt), request_id in self._loading, prompt.sequence)
            assert prompt.sequence is not None or any(stages), f"{request_id} is lost"
            assert not prompt.is_dropped, f"{request_id} is over and wanted"
