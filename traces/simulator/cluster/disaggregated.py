"""A disaggregated cluster in virtual time: machines, network, gateway, and the conductor's own state machine.

`handle` is the handler of an `EventLoop`. It notifies the pieces, passes the outcomes of one to the next (placement →
preparation → chunks → handoff → tokens), and returns the events that follow. Each piece is pure and does not know the
others. This module knows how they are connected and not how they work.
"""

from collections.abc import Iterable, Iterator, Sequence

from moonserve.traces.simulator.cluster.event_loop import (
    Arrive,
    Event,
    FaultBegins,
    FaultEnds,
    HandoffDone,
    HeartbeatDue,
    LandingConfirmed,
    RetryPlacement,
    SampleDue,
    TimedEvent,
    WakeUp,
    WakeUps,
)
from moonserve.traces.simulator.cluster.gateway import RETRY_PAUSE_S, Gateway, arrivals
from moonserve.traces.simulator.cluster.heartbeats_and_samples import HeartbeatSender, SampleSeries
from moonserve.traces.simulator.cluster.kv_transfers import Handoffs, Loaded, PrefixLoads
from moonserve.traces.simulator.cluster.nodes import ClusterBuilder, DecodeNode, Node, PrefillNode, layout_of
from moonserve.traces.simulator.cluster.request_state import Phase, RequestState
from moonserve.traces.simulator.decode import DecodeOutcome, LandingGranted
from moonserve.traces.simulator.network import Network
from moonserve.traces.simulator.prefill import ChunkStarted, PrefillOutcome, Prepare, Prompt, PromptComputed
from moonserve.traces.simulator.sequence import Finished
from moonserve.traces.simulator.shared_host import SharedHost
from moonserve.traces.simulator.spec import ClusterSpec, Fault


class DisaggregatedCluster:
    """A cluster that serves a trace's requests. Call `begin`, pass `handle` to an event loop, read the requests."""

    def __init__(self, spec: ClusterSpec, requests: Sequence[RequestState]) -> None:
        """Raises ConfigError for an invalid spec."""
        spec.check()
        self.spec = spec
        self.requests = requests
        self._block_size, self._block_bytes = spec.block_size, layout_of(spec).block_bytes
        self._host = SharedHost(spec.model.crowding, spec.model.overheads)
        self._builder = ClusterBuilder(spec, self._host, self._cached_now, self._publish)
        self.prefills, self.decodes = self._builder.nodes()
        self._nodes: dict[str, Node] = {n.name: n for n in (*self.prefills, *self.decodes)}
        self.network = Network(self._builder.links(self._nodes.values()))
        self.conductor = self._builder.conductor()
        self.heartbeats = HeartbeatSender(spec, self.conductor)
        self.gateway = Gateway(self.conductor, spec)
        stores = {node.store_id: node for node in self.prefills}
        self.loads = PrefixLoads(self.network, stores, self._block_bytes)
        self.handoffs = Handoffs(self.network)
        self._wakes, self._out = WakeUps(), list[TimedEvent[Event]]()
        self.samples = SampleSeries([request.record for request in requests], spec.num_ranks)
        self._request_of: dict[str, RequestState] = {}  # by request id, while placed

    def begin(self) -> Iterator[TimedEvent[Event]]:
        """Registers all machines and yields the first events."""
        for node in (each for each in self._nodes.values() if each.is_alive):
            self.heartbeats.register(node, 0.0)
            yield TimedEvent(node.heartbeat_at, HeartbeatDue(node))
        self.gateway.num_open += len(self.requests)
        yield from arrivals(self.requests, self.spec.model.overheads)
        for fault in self.spec.faults:
            yield TimedEvent(fault.at_s, FaultBegins(fault))
        yield TimedEvent(0.0, SampleDue())

    # -- events

    def handle(self, event: Event, now: float) -> list[TimedEvent[Event]]:
        self._out = []
        self._handle_event(event, now)
        self._schedule_wakes(now)
        return self._out

    def _handle_event(self, event: Event, now: float) -> None:
        match event:
            case Arrive(request):
                self.samples.count_uses(request.record.hash_ids)
                self._schedule_after(self._host.late_s, RetryPlacement(request, request.attempt), now)
            case RetryPlacement(request, attempt):
                if request.phase is Phase.PLACING and request.attempt == attempt:
                    self._place(request, now)
            case LandingConfirmed(request_id):
                self._landing_confirmed(request_id, now)
            case HandoffDone(request_id):
                self._take_over(request_id, now)
            case WakeUp(node):
                self._wake(node, now)
            case HeartbeatDue(node):
                self._send_heartbeat(node, now)
            case FaultBegins(fault):
                self._fault_begins(fault, now)
            case FaultEnds(fault):
                self._fault_ends(self._nodes[fault.instance], fault, now)
            case SampleDue():
                self._sample(now)

    def _schedule_wakes(self, now: float) -> None:
        if self._host.is_shared:
            self._update_host_load(now)
        for node in self._wakes.take_touched():
            self._out += self._wakes.next(node, node.machine.wake_at, now)
            if isinstance(node, PrefillNode) and self.heartbeats.advance_heartbeat(node, now):
                self._schedule_at(node.heartbeat_at, HeartbeatDue(node))
        self._out += self._wakes.next(None, self.network.wake_at, now)

    def _update_host_load(self, now: float) -> None:
        """Updates which machines compute. A change affects the other machines from their next step on."""
        is_news = [
            self._host.set_computing(node.name, node.machine.is_computing, decodes=isinstance(node, DecodeNode))
            for node in self._wakes.touched
        ]
        for decode in self.decodes if any(is_news) else ():
            self._on_decode_outcomes(decode, decode.machine.slowdown_changed(now), now)

    def _wake(self, node: Node | None, now: float) -> None:
        self._wakes.woken(node, now)
        if node is None:
            for flow_id in self.network.advance(now):
                self._flow_ended(flow_id, now)
        elif isinstance(node, PrefillNode):
            self._on_prefill_outcomes(node, node.machine.advance(now), now)
        elif isinstance(node, DecodeNode):
            self._on_decode_outcomes(node, node.machine.advance(now), now)

    def _flow_ended(self, flow_id: int, now: float) -> None:
        if (loaded := self.loads.flow_ended(flow_id)) is not None:
            self._loaded(loaded, now)
        if (request_id := self.handoffs.flow_ended(flow_id)) is not None:
            self._hand_off(request_id, now)

    def _send_heartbeat(self, node: Node, now: float) -> None:
        if node.heartbeat_at != now or not node.is_alive or not self.gateway.num_open:
            return
        self.heartbeats.send_heartbeat(node, now)
        self._schedule_at(node.heartbeat_at, HeartbeatDue(node))

    def _sample(self, now: float) -> None:
        self.samples.take(self.prefills, self.decodes, now)
        if self.gateway.num_open:
            self._schedule_at(now + self.spec.sample_interval_s, SampleDue())

    # -- life of a request

    def _place(self, request: RequestState, now: float) -> None:
        if not self.gateway.place(request, now):
            if request.phase is Phase.PLACING:
                self._schedule_at(now + RETRY_PAUSE_S, RetryPlacement(request, request.attempt))
            return
        self._begin(request, now)

    def _begin(self, request: RequestState, now: float) -> None:
        prefill = self._machines_of(request)[0]
        if not prefill.is_alive:
            self._end_attempt(request, prefill, now)
            return
        self._request_of[request.request_id] = request
        prompt = self._builder.prompt(request, request.placed, prefill, now)
        self._on_prefill_outcomes(prefill, prefill.machine.submit(prompt, now), now)

    def _machines_of(self, request: RequestState) -> tuple[PrefillNode, DecodeNode]:
        prefill = self._nodes[request.placed.prefill.instance_id]
        decode = self._nodes[request.placed.decode.instance_id]
        assert isinstance(prefill, PrefillNode) and isinstance(decode, DecodeNode)  # noqa: PT018
        return prefill, decode

    def _on_prefill_outcomes(self, node: PrefillNode, outcomes: Iterable[PrefillOutcome], now: float) -> None:
        self._wakes.touch(node)
        for outcome in outcomes:
            request = self._request_of.get(outcome.prompt.request_id)
            if request is None:  # an earlier outcome has ended it
                continue
            match outcome:
                case Prepare(prompt):
                    self._prepare(node, request, prompt, now)
                case ChunkStarted():
                    self._send(node, request, outcome, now)
                case PromptComputed(prompt):
                    self._computed(node, request, prompt, now)

    def _prepare(self, node: PrefillNode, request: RequestState, prompt: Prompt, now: float) -> None:
        """Reserves landing blocks on the decode machine and loads the prefix."""
        decode = self._machines_of(request)[1]
        request_id = prompt.request_id
        if request.num_remaining == 1:  # the first token is the last one
            self._on_prefill_outcomes(node, node.machine.landing_granted(request_id, now), now)
        elif not decode.is_alive:
            self._end_attempt(request, decode, now)
            return
        else:
            granted = decode.machine.reserve(request_id, prompt.num_tokens, now)
            self._on_decode_outcomes(decode, granted, now)
        self._load_prefix(node, request, now)

    def _load_prefix(self, node: PrefillNode | DecodeNode, request: RequestState, now: float) -> None:
        sources = () if self.spec.pool == "local" else request.placed.prefix_sources
        keys = request.reusable_keys(self._block_size)
        loaded = self.loads.begin(request.request_id, node, keys, sources, now)
        if loaded is not None:
            self._loaded(loaded, now)

    def _cached_now(self, prompt: Prompt) -> int:
        """Returns the tokens cached at a prompt's machine when it starts. Earlier prompts may have added some since."""
        request = self._request_of[prompt.request_id]
        node = self._machines_of(request)[0]
        return node.store.prefix(request.reusable_keys(self._block_size)) * self._block_size

    def _publish(self, prompt: Prompt) -> None:
        """Puts the computed part of a prompt into the store, so that it is shared before the rest is computed."""
        request = self._request_of[prompt.request_id]
        store, num_blocks = self._machines_of(request)[0].store, prompt.computed // self._block_size
        store.put(request.keys[:num_blocks], prompt.cached // self._block_size)

    def _loaded(self, loaded: Loaded, now: float) -> None:
        node, cached = loaded.node, loaded.num_blocks * self._block_size
        assert isinstance(node, PrefillNode)
        self._on_prefill_outcomes(node, node.machine.prefix_loaded(loaded.request_id, cached, now), now)

    def _send(self, node: PrefillNode, request: RequestState, chunk: ChunkStarted, now: float) -> None:
        if request.num_remaining > 1:
            first = 0 if chunk.first == chunk.prompt.cached else chunk.first
            num_bytes = (chunk.end - first) * self.spec.model.kv_bytes_per_token
            target = self._machines_of(request)[1].name
            self.handoffs.send(chunk.prompt.request_id, node.name, target, num_bytes, chunk.ends_at, now)

    def _computed(self, node: PrefillNode, request: RequestState, prompt: Prompt, now: float) -> None:
        back_s = self._host.back_s(node.name, goes_on=node.machine.is_computing)
        self.gateway.first_token(request, prompt, now, back_s)
        if request.end is not None:
            del self._request_of[prompt.request_id]
        elif self.handoffs.computed(prompt.request_id):
            self._hand_off(prompt.request_id, now)

    def _hand_off(self, request_id: str, now: float) -> None:
        """Schedules the takeover of a computed and sent prompt. Counts from its first token's arrival at the client."""
        if (request := self._request_of.get(request_id)) is not None:
            node = self._machines_of(request)[0]
            handoff_s = self._host.handoff_s(node.name, goes_on=node.machine.is_computing)
            back_s = self._host.back_s(node.name, goes_on=node.machine.is_computing)
            self._schedule_after(back_s + handoff_s, HandoffDone(request_id), now)

    def _schedule_at(self, at: float, event: Event) -> None:
        self._out.append(TimedEvent(at, event))

    def _schedule_after(self, seconds: float, event: Event, now: float) -> None:
        """Schedules an event. Without a delay it is handled at once, so that no other event comes between."""
        if seconds > 0.0:
            self._schedule_at(now + seconds, event)
        else:
            self._handle_event(event, now)

    def _take_over(self, request_id: str, now: float) -> None:
        request = self._request_of.get(request_id)
        if request is None:  # it has ended meanwhile
            return
        decode = self._machines_of(request)[1]
        if decode.machine.would_miss_tbt(request.num_tokens, now):
            del self._request_of[request.request_id]
            self.gateway.reject(request, "tbt_slo_at_handoff", now)
            self._on_decode_outcomes(decode, decode.machine.cancel(request.request_id, now), now)
            return
        request.phase = Phase.DECODING
        decode.landed.add(request.index)
        outcomes = decode.machine.land(
            request.request_id,
            request.num_tokens - 1,
            request.num_remaining,
            request.last_token_at,
            now,
        )
        self._on_decode_outcomes(decode, outcomes, now)

    def _on_decode_outcomes(self, node: DecodeNode, outcomes: Iterable[DecodeOutcome], now: float) -> None:
        self._wakes.touch(node)
        for outcome in outcomes:
            if isinstance(outcome, LandingGranted):
                waiting = self._request_of.get(outcome.request_id)
                own = None if waiting is None else self._machines_of(waiting)[0].name
                landing_s = self._host.overheads_now(own).landing_s
                self._schedule_after(landing_s, LandingConfirmed(outcome.request_id), now)
            elif isinstance(outcome, Finished):
                request = self._request_of.pop(outcome.sequence.request_id)
                node.landed.discard(request.index)
                request.take_tokens(outcome.gaps_s, outcome.at)
                self.gateway.finish(request, now)

    def _landing_confirmed(self, request_id: str, now: float) -> None:
        request = self._request_of.get(request_id)
        if request is not None:
            prefill = self._machines_of(request)[0]
            self._on_prefill_outcomes(prefill, prefill.machine.landing_granted(request_id, now), now)

    # -- faults

    def _fault_begins(self, fault: Fault, now: float) -> None:
        node = self._nodes[fault.instance]
        if fault.for_s is not None:
            self._schedule_at(now + fault.for_s, FaultEnds(fault))
        if fault.silent:
            node.is_silent = True
        elif node.is_alive:
            self._kill(node, now)

    def _kill(self, node: Node, now: float) -> None:
        """Breaks all connections of a machine at once. The conductor is not notified."""
        node.is_alive = False
        for request in [j for j in self._request_of.values() if self._runs_on(j, node)]:
            self._end_attempt(request, node, now)
        if isinstance(node, PrefillNode):
            for loaded in self.loads.source_died(node, now):
                self._loaded(loaded, now)
        self._builder.replace_machine(node)

    def _runs_on(self, request: RequestState, node: Node) -> bool:
        prefill, decode = self._machines_of(request)
        return node is decode or (node is prefill and request.phase is Phase.PREFILLING)

    def _end_attempt(self, request: RequestState, broken: Node, now: float) -> None:
        """Ends the attempt on all machines and places the next one."""
        request_id = request.request_id
        prefill, decode = self._machines_of(request)
        self._request_of.pop(request_id, None)
        request.take_tokens(decode.machine.gaps_so_far(request_id, now), now)
        decode.landed.discard(request.index)
        self.handoffs.cancel(request_id, now)
        self.loads.cancel(request_id, now)
        self._place_again(request, broken, now)
        if prefill is not broken:
            self._on_prefill_outcomes(prefill, prefill.machine.cancel(request_id, now), now)
        if decode is not broken:
            self._on_decode_outcomes(decode, decode.machine.cancel(request_id, now), now)

    def _place_again(self, request: RequestState, broken: Node, now: float) -> None:
        if self.gateway.end_attempt(request, broken.name, now):
            self._schedule_at(now, RetryPlacement(request, request.attempt))

    def _fault_ends(self, node: Node, fault: Fault, now: float) -> None:
        if fault.silent:
            node.is_silent = False
        elif not node.is_alive:
            self._start(node, now)

    def _start(self, node: Node, now: float) -> None:
        self._builder.restart(node)
        self.heartbeats.register(node, now)
        self._schedule_at(node.heartbeat_at, HeartbeatDue(node))

    @property
    def counters(self) -> dict[str, float]:
        """Counters for the result, in addition to the figures of requests."""
        stores = [node.store for node in self.prefills]
        return {
            "heartbeats": self.heartbeats.num_heartbeats,
            "bytes_moved": self.network.bytes_transferred,
            "blocks_read_locally": self.loads.blocks_local,
            "blocks_fetched": self.loads.blocks_fetched,
            "evicted_blocks": sum(store.num_evicted for store in stores),
            "refused_blocks": sum(store.num_refused for store in stores),
            "preemptions": sum(node.machine.num_preemptions for node in self.decodes),
            "device_s": sum(request.prefill_s for request in self.requests),
        }

    def validate(self) -> None:
        """Raises AssertionError if the invariants of any piece are violated."""
        for piece in (self.network, self.loads, self.handoffs, self.conductor):
            piece.validate()
        for prefill in self.prefills:
            prefill.machine.validate()
            prefill.store.validate(self.loads.held_at(prefill))
        for decode in self.decodes:
            decode.machine.validate()
        placed = [j for j in self.requests if j.phase in (Phase.PREFILLING, Phase.DECODING)]
        assert {j.request_id for j in placed} == self._request_of.keys(), "a request is lost"
