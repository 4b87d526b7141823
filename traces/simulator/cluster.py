"""A disaggregated cluster in virtual time: machines, network, gateway, and the conductor's own state machine.

`handle` is the event handler of a `Clock`. It notifies the pieces, passes the outcomes of one to the next (placement →
preparation → chunks → handoff → tokens), and returns the events that follow. Each piece is pure and does not know the
others. This module knows how they are connected and not how they work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from traces.simulator.clock import Timed
from traces.simulator.decode import DecodeOutcome, Granted
from traces.simulator.events import (
    Arrive,
    Beat,
    Event,
    FaultBegins,
    FaultEnds,
    LandingKnown,
    PlaceAgain,
    Sample,
    TakeOver,
    Wake,
    Wakes,
)
from traces.simulator.gateway import PAUSE_S, Gateway, arrivals
from traces.simulator.host import Host
from traces.simulator.journey import Journey, Phase
from traces.simulator.loads import Handoffs, Loaded, PrefixLoads
from traces.simulator.machines import DecodeNode, Node, PrefillNode, Workshop, layout_of
from traces.simulator.membership import Membership
from traces.simulator.network import Network
from traces.simulator.prefill import ChunkBegun, Computed, PrefillOutcome, Prepare, Prompt
from traces.simulator.sampling import Samples
from traces.simulator.sequence import Finished
from traces.simulator.spec import ClusterSpec, Fault, Overheads


class Cluster:
    """A cluster that serves a trace's requests. Call `begin`, pass `handle` to a clock, then read the journeys."""

    def __init__(self, spec: ClusterSpec, journeys: Sequence[Journey]) -> None:
        """Raises ConfigError for an invalid spec."""
        spec.check()
        self.spec = spec
        self.journeys = journeys
        self._block_size, self._block_bytes = spec.block_size, layout_of(spec).block_bytes
        self._host = Host(spec.model.crowding, spec.model.overheads)
        self._workshop = Workshop(spec, self._host, self._cached_now, self._publish)
        self.prefills, self.decodes = self._workshop.nodes()
        self._nodes: dict[str, Node] = {n.name: n for n in (*self.prefills, *self.decodes)}
        self.network = Network(self._workshop.links(self._nodes.values()))
        self.conductor = self._workshop.conductor()
        self.membership = Membership(spec, self.conductor)
        self.gateway = Gateway(self.conductor, spec)
        stores = {node.store_id: node for node in self.prefills}
        self.loads = PrefixLoads(self.network, stores, self._block_bytes)
        self.handoffs = Handoffs(self.network)
        self._wakes, self._out = Wakes(), list[Timed[Event]]()
        self.samples = Samples([journey.record for journey in journeys], spec.num_ranks)
        self._journey_of: dict[str, Journey] = {}  # by request id, while placed

    def begin(self) -> Iterator[Timed[Event]]:
        """Registers all machines and yields the first events."""
        for node in (each for each in self._nodes.values() if each.is_alive):
            self.membership.register(node, 0.0)
            yield Timed(node.beat_at, Beat(node))
        self.gateway.num_open += len(self.journeys)
        yield from arrivals(self.journeys, self.spec.model.overheads)
        for fault in self.spec.faults:
            yield Timed(fault.at_s, FaultBegins(fault))
        yield Timed(0.0, Sample())

    # -- events

    def handle(self, event: Event, now: float) -> list[Timed[Event]]:
        self._out = []
        self._happens(event, now)
        self._schedule_wakes(now)
        return self._out

    def _happens(self, event: Event, now: float) -> None:
        match event:
            case Arrive(journey):
                self.samples.used(journey.record.hash_ids)
                self._after(self._host.late_s, PlaceAgain(journey, journey.attempt), now)
            case PlaceAgain(journey, attempt):
                if journey.phase is Phase.PLACING and journey.attempt == attempt:
                    self._place(journey, now)
            case LandingKnown(request_id):
                self._landing_known(request_id, now)
            case TakeOver(request_id):
                self._take_over(request_id, now)
            case Wake(node):
                self._wake(node, now)
            case Beat(node):
                self._beat(node, now)
            case FaultBegins(fault):
                self._fault_begins(fault, now)
            case FaultEnds(fault):
                self._fault_ends(self._nodes[fault.instance], fault, now)
            case Sample():
                self._sample(now)

    def _schedule_wakes(self, now: float) -> None:
        if self._host.is_shared:
            self._note_who_computes(now)
        for node in self._wakes.take_touched():
            self._out += self._wakes.of_machine(node, now)
            if isinstance(node, PrefillNode) and self.membership.changed(node, now):
                self._later(node.beat_at, Beat(node))
        self._out += self._wakes.of_network(self.network, now)

    def _note_who_computes(self, now: float) -> None:
        """Updates which machines compute. A change affects the other machines from their next step on."""
        is_news = [
            self._host.note(node.name, node.machine.is_computing, decodes=isinstance(node, DecodeNode))
            for node in self._wakes.touched
        ]
        for decode in self.decodes if any(is_news) else ():
            self._decode_did(decode, decode.machine.slowdown_changed(now), now)

    def _wake(self, node: Node | None, now: float) -> None:
        self._wakes.woken(node, now)
        if node is None:
            for flow_id in self.network.advance(now):
                self._flow_ended(flow_id, now)
        elif isinstance(node, PrefillNode):
            self._prefill_did(node, node.machine.advance(now), now)
        elif isinstance(node, DecodeNode):
            self._decode_did(node, node.machine.advance(now), now)

    def _flow_ended(self, flow_id: int, now: float) -> None:
        if (loaded := self.loads.flow_ended(flow_id)) is not None:
            self._loaded(loaded, now)
        if (request_id := self.handoffs.flow_ended(flow_id)) is not None:
            self._hand_off(request_id, now)

    def _beat(self, node: Node, now: float) -> None:
        if node.beat_at != now or not node.is_alive or not self.gateway.num_open:
            return
        self.membership.beat(node, now)
        self._later(node.beat_at, Beat(node))

    def _sample(self, now: float) -> None:
        self.samples.take(self.prefills, self.decodes, now)
        if self.gateway.num_open:
            self._later(now + self.spec.sample_interval_s, Sample())

    # -- life of a request

    def _place(self, journey: Journey, now: float) -> None:
        if not self.gateway.place(journey, now):
            if journey.phase is Phase.PLACING:
                self._later(now + PAUSE_S, PlaceAgain(journey, journey.attempt))
            return
        self._begin(journey, now)

    def _begin(self, journey: Journey, now: float) -> None:
        prefill = self._machines_of(journey)[0]
        if not prefill.is_alive:
            self._lose(journey, prefill, now)
            return
        assert journey.placement is not None
        self._journey_of[journey.request_id] = journey
        prompt = self._workshop.prompt(journey, journey.placement, prefill, now)
        self._prefill_did(prefill, prefill.machine.submit(prompt, now), now)

    def _machines_of(self, journey: Journey) -> tuple[PrefillNode, DecodeNode]:
        placement = journey.placement
        assert placement is not None
        prefill = self._nodes[placement.prefill.instance_id]
        decode = self._nodes[placement.decode.instance_id]
        assert isinstance(prefill, PrefillNode) and isinstance(decode, DecodeNode)  # noqa: PT018
        return prefill, decode

    def _prefill_did(self, node: PrefillNode, outcomes: Iterable[PrefillOutcome], now: float) -> None:
        self._wakes.touch(node)
        for outcome in outcomes:
            journey = self._journey_of.get(outcome.prompt.request_id)
            if journey is None:  # an earlier outcome has ended it
                continue
            match outcome:
                case Prepare(prompt):
                    self._prepare(node, journey, prompt, now)
                case ChunkBegun():
                    self._send(node, journey, outcome, now)
                case Computed(prompt):
                    self._computed(node, journey, prompt, now)

    def _prepare(self, node: PrefillNode, journey: Journey, prompt: Prompt, now: float) -> None:
        """Reserves landing blocks on the decode machine and loads the prefix."""
        assert journey.placement is not None
        decode = self._machines_of(journey)[1]
        request_id = prompt.request_id
        if journey.num_remaining == 1:  # the first token is the last one
            self._prefill_did(node, node.machine.landing_granted(request_id, now), now)
        elif not decode.is_alive:
            self._lose(journey, decode, now)
            return
        else:
            granted = decode.machine.reserve(request_id, prompt.num_tokens, now)
            self._decode_did(decode, granted, now)
        sources = () if self.spec.pool == "local" else journey.placement.prefix_sources
        keys = journey.usable(self._block_size)
        loaded = self.loads.begin(request_id, node, keys, sources, now)
        if loaded is not None:
            self._loaded(loaded, now)

    def _cached_now(self, prompt: Prompt) -> int:
        """Returns the tokens cached at a prompt's machine when it starts. Earlier prompts may have added some since."""
        journey = self._journey_of[prompt.request_id]
        node = self._machines_of(journey)[0]
        return node.store.prefix(journey.usable(self._block_size)) * self._block_size

    def _publish(self, prompt: Prompt) -> None:
        """Puts the computed part of a prompt into the store, so that it is shared before the rest is computed."""
        journey = self._journey_of[prompt.request_id]
        store, num_blocks = self._machines_of(journey)[0].store, prompt.computed // self._block_size
        store.put(journey.keys[:num_blocks], prompt.cached // self._block_size)

    def _loaded(self, loaded: Loaded, now: float) -> None:
        node, cached = loaded.node, loaded.num_blocks * self._block_size
        assert isinstance(node, PrefillNode)
        self._prefill_did(node, node.machine.prefix_loaded(loaded.request_id, cached, now), now)

    def _send(self, node: PrefillNode, journey: Journey, chunk: ChunkBegun, now: float) -> None:
        if journey.num_remaining > 1:
            first = 0 if chunk.first == chunk.prompt.cached else chunk.first
            num_bytes = (chunk.end - first) * self.spec.model.kv_bytes_per_token
            target = self._machines_of(journey)[1].name
            self.handoffs.send(chunk.prompt.request_id, node.name, target, num_bytes, chunk.ends_at, now)

    def _computed(self, node: PrefillNode, journey: Journey, prompt: Prompt, now: float) -> None:
        back_s = self._host.back_s(node.name, goes_on=node.machine.is_computing)
        self.gateway.first_token(journey, prompt, now, back_s)
        if journey.end is not None:
            del self._journey_of[prompt.request_id]
        elif self.handoffs.computed(prompt.request_id):
            self._hand_off(prompt.request_id, now)

    def _hand_off(self, request_id: str, now: float) -> None:
        """Schedules the takeover of a computed and sent prompt. Counts from its first token's arrival at the client."""
        if (journey := self._journey_of.get(request_id)) is not None:
            node = self._machines_of(journey)[0]
            handoff_s = self._host.handoff_s(node.name, goes_on=node.machine.is_computing)
            back_s = self._host.back_s(node.name, goes_on=node.machine.is_computing)
            self._after(back_s + handoff_s, TakeOver(request_id), now)

    def _overheads_of(self, request_id: str) -> Overheads:
        journey = self._journey_of.get(request_id)
        own = None if journey is None else self._machines_of(journey)[0].name
        return self._host.overheads_beside(own)

    def _later(self, at: float, event: Event) -> None:
        self._out.append(Timed(at, event))

    def _after(self, seconds: float, event: Event, now: float) -> None:
        """Schedules an event. Without a delay it is handled at once, so that no other event comes between."""
        if seconds > 0.0:
            self._later(now + seconds, event)
        else:
            self._happens(event, now)

    def _take_over(self, request_id: str, now: float) -> None:
        journey = self._journey_of.get(request_id)
        if journey is None:  # it has ended meanwhile
            return
        decode = self._machines_of(journey)[1]
        if decode.machine.refuses(journey.num_tokens, now):
            del self._journey_of[journey.request_id]
            self.gateway.reject(journey, "tbt_slo_at_handoff", now)
            self._decode_did(decode, decode.machine.cancel(journey.request_id, now), now)
            return
        journey.phase = Phase.DECODING
        decode.landed.add(journey.index)
        outcomes = decode.machine.land(
            journey.request_id,
            journey.num_tokens - 1,
            journey.num_remaining,
            journey.last_token_at,
            now,
        )
        self._decode_did(decode, outcomes, now)

    def _decode_did(self, node: DecodeNode, outcomes: Iterable[DecodeOutcome], now: float) -> None:
        self._wakes.touch(node)
        for outcome in outcomes:
            if isinstance(outcome, Granted):
                landing_s = self._overheads_of(outcome.request_id).landing_s
                self._after(landing_s, LandingKnown(outcome.request_id), now)
            elif isinstance(outcome, Finished):
                journey = self._journey_of.pop(outcome.sequence.request_id)
                node.landed.discard(journey.index)
                journey.take_decoded(outcome.gaps_s, outcome.at)
                self.gateway.finish(journey, now)

    def _landing_known(self, request_id: str, now: float) -> None:
        journey = self._journey_of.get(request_id)
        if journey is not None:
            prefill = self._machines_of(journey)[0]
            self._prefill_did(prefill, prefill.machine.landing_granted(request_id, now), now)

    # -- faults

    def _fault_begins(self, fault: Fault, now: float) -> None:
        node = self._nodes[fault.instance]
        if fault.for_s is not None:
            self._later(now + fault.for_s, FaultEnds(fault))
        if fault.silent:
            node.is_silent = True
        elif node.is_alive:
            self._die(node, now)

    def _die(self, node: Node, now: float) -> None:
        """Breaks all connections of a machine at once. The conductor is not notified."""
        node.is_alive = False
        for journey in [j for j in self._journey_of.values() if self._is_hit(j, node)]:
            self._lose(journey, node, now)
        if isinstance(node, PrefillNode):
            for loaded in self.loads.source_died(node, now):
                self._loaded(loaded, now)
        self._workshop.machine_again(node)

    def _is_hit(self, journey: Journey, node: Node) -> bool:
        prefill, decode = self._machines_of(journey)
        return node is decode or (node is prefill and journey.phase is Phase.PREFILLING)

    def _lose(self, journey: Journey, broken: Node, now: float) -> None:
        """Ends the attempt on all machines and places the next one."""
        request_id = journey.request_id
        prefill, decode = self._machines_of(journey)
        self._journey_of.pop(request_id, None)
        journey.take_decoded(decode.machine.gaps_so_far(request_id, now), now)
        decode.landed.discard(journey.index)
        self.handoffs.cancel(request_id, now)
        self.loads.cancel(request_id, now)
        self._again(journey, broken, now)
        if prefill is not broken:
            self._prefill_did(prefill, prefill.machine.cancel(request_id, now), now)
        if decode is not broken:
            self._decode_did(decode, decode.machine.cancel(request_id, now), now)

    def _again(self, journey: Journey, broken: Node, now: float) -> None:
        if self.gateway.lose(journey, [broken.name], now):
            self._later(now, PlaceAgain(journey, journey.attempt))

    def _fault_ends(self, node: Node, fault: Fault, now: float) -> None:
        if fault.silent:
            node.is_silent = False
        elif not node.is_alive:
            self._start(node, now)

    def _start(self, node: Node, now: float) -> None:
        self._workshop.restart(node)
        self.membership.register(node, now)
        self._later(node.beat_at, Beat(node))

    @property
    def counters(self) -> dict[str, float]:
        """Counters for the result, in addition to the figures of requests."""
        stores = [node.store for node in self.prefills]
        return {
            "heartbeats": self.membership.num_heartbeats,
            "bytes_moved": self.network.bytes_carried,
            "blocks_read_locally": self.loads.blocks_local,
            "blocks_fetched": self.loads.blocks_fetched,
            "evicted_blocks": sum(store.num_evicted for store in stores),
            "refused_blocks": sum(store.num_refused for store in stores),
            "preemptions": sum(node.machine.num_preemptions for node in self.decodes),
            "device_s": sum(journey.prefill_s for journey in self.journeys),
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
        placed = [j for j in self.journeys if j.phase in (Phase.PREFILLING, Phase.DECODING)]
        assert {j.request_id for j in placed} == self._journey_of.keys(), "a request is lost"
