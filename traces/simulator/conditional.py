"""A cluster whose decode machines prefill prompts themselves if the conductor decides so, as live workers do.

See docs/conditional-disaggregation.md. The decode machine reserves the prompt's blocks like landing blocks, loads the
prefix from the stores over the network, and computes the rest in chunks next to decode steps. The new blocks are then
put into the store that the prefix came from, so that chains stay together, or into the stores in turn if nothing was
read. A put is lost if its store dies. Not modelled: blocks in the decode machines' own device memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.keys import BlockKey
from protocol.request import Placement
from traces.simulator.cluster import Cluster
from traces.simulator.decode import DecodeOutcome, Granted
from traces.simulator.journey import Journey, Phase
from traces.simulator.loads import Loaded
from traces.simulator.machines import DecodeNode, Node, PrefillNode
from traces.simulator.network import FlowId
from traces.simulator.prefill import Prompt
from traces.simulator.sequence import Sampled
from traces.simulator.spec import ClusterSpec


class _Put(NamedTuple):
    """New blocks in flight to a store."""

    target: PrefillNode
    keys: Sequence[BlockKey]  # of the whole chain
    first: int  # position of the first new block


class ConditionalCluster(Cluster):
    """A cluster with undivided requests: `_prompts` has the prompts that decode machines read, by request."""

    def __init__(self, spec: ClusterSpec, journeys: Sequence[Journey]) -> None:
        """Raises ConfigError for an invalid spec."""
        super().__init__(spec, journeys)
        self._prompts: dict[str, Prompt] = {}  # until their first token
        self._puts: dict[FlowId, _Put] = {}
        self._num_undivided = 0

    # -- life of a request

    def _begin(self, journey: Journey, now: float) -> None:
        assert journey.placement is not None
        if not journey.placement.is_undivided:
            super()._begin(journey, now)
            return
        node, request_id = self._reader_of(journey), journey.request_id
        if not node.is_alive:
            self._lose(journey, node, now)
            return
        self._journey_of[request_id] = journey
        self._num_undivided += 1
        self._prompts[request_id] = Prompt(
            request_id=request_id, rank=(0,), num_tokens=journey.num_tokens, submitted_at=now
        )
        self._decode_did(node, node.machine.reserve(request_id, journey.num_tokens, now), now)

    def _reader_of(self, journey: Journey) -> DecodeNode:
        assert journey.placement is not None
        node = self._nodes[journey.placement.decode.instance_id]
        assert isinstance(node, DecodeNode)
        return node

    def _decode_did(self, node: DecodeNode, outcomes: Iterable[DecodeOutcome], now: float) -> None:
        self._wakes.touch(node)
        for outcome in outcomes:
            if isinstance(outcome, Sampled):
                self._sampled(node, outcome, now)
            elif isinstance(outcome, Granted) and outcome.request_id in self._prompts:
                self._granted(node, self._journey_of[outcome.request_id], now)
            else:
                super()._decode_did(node, [outcome], now)

    def _granted(self, node: DecodeNode, journey: Journey, now: float) -> None:
        """Starts loading the prefix into the granted blocks."""
        assert journey.placement is not None
        sources = () if self.spec.pool == "local" else journey.placement.prefix_sources
        keys = journey.usable(self._block_size)
        loaded = self.loads.begin(journey.request_id, node, keys, sources, now)
        if loaded is not None:
            self._loaded(loaded, now)

    def _loaded(self, loaded: Loaded, now: float) -> None:
        node = loaded.node
        if not isinstance(node, DecodeNode):
            super()._loaded(loaded, now)
            return
        journey, prompt = self._journey_of[loaded.request_id], self._prompts[loaded.request_id]
        prompt.loaded_at, prompt.cached = now, loaded.num_blocks * self._block_size
        outcomes = node.machine.read(loaded.request_id, prompt.num_tokens, prompt.cached, journey.num_remaining, now)
        self._decode_did(node, outcomes, now)

    def _sampled(self, node: DecodeNode, outcome: Sampled, now: float) -> None:
        """Takes the first token of a computed prompt and puts its KV into a store."""
        sequence = outcome.sequence
        journey = self._journey_of[sequence.request_id]
        prompt = self._prompts.pop(sequence.request_id)
        assert sequence.begun_at is not None
        prompt.load_s = prompt.loaded_at - prompt.submitted_at
        prompt.started_at, prompt.compute_s = sequence.begun_at, sequence.prefill_s
        journey.phase = Phase.DECODING
        node.landed.add(journey.index)
        keys = journey.keys[: prompt.num_tokens // self._block_size]
        if journey.num_remaining > 1:
            self.gateway.first_token(journey, prompt, outcome.at)
        else:  # `Finished` follows and ends the request
            self._only_token(journey, prompt, outcome.at)
        self._put(node, journey, keys, prompt.cached // self._block_size, now)

    def _only_token(self, journey: Journey, prompt: Prompt, at: float) -> None:
        journey.cached_tokens, journey.prefill_s = prompt.cached, prompt.compute_s
        journey.take_token(at)

    def _put(
        self,
        node: DecodeNode,
        journey: Journey,
        keys: Sequence[BlockKey],
        num_cached: int,
        now: float,
    ) -> None:
        assert journey.placement is not None
        target = self._home_of(node, journey.placement)
        num_new = len(keys) - num_cached
        if not num_new or not target.is_alive:
            return
        links = [f"{node.name}/out", f"{target.name}/in"]
        flow = self.network.start(links, num_new * self._block_bytes, now)
        self._puts[flow] = _Put(target, keys, num_cached)

    def _home_of(self, node: DecodeNode, placement: Placement) -> PrefillNode:
        """Returns the machine whose store receives the new blocks of this prompt."""
        if placement.prefix_sources and self.spec.pool == "global":
            name = placement.prefix_sources[-1].store.instance_id
            return next(each for each in self.prefills if each.store_id == name)
        return self.prefills[self._num_undivided % len(self.prefills)]

    def _flow_ended(self, flow_id: FlowId, now: float) -> None:
        put = self._puts.pop(flow_id, None)
        if put is None:
            super()._flow_ended(flow_id, now)
        elif put.target.is_alive:
            put.target.store.put(put.keys, put.first)
            self._wakes.touch(put.target)

    # -- faults

    def _is_hit(self, journey: Journey, node: Node) -> bool:
        assert journey.placement is not None
        if journey.placement.is_undivided:
            return node.name == journey.placement.decode.instance_id
        return super()._is_hit(journey, node)

    def _lose(self, journey: Journey, broken: Node, now: float) -> None:
        assert journey.placement is not None
        if not journey.placement.is_undivided:
            super()._lose(journey, broken, now)
            return
        node, request_id = self._reader_of(journey), journey.request_id
        self._journey_of.pop(request_id, None)
        if self._prompts.pop(request_id, None) is None:
            journey.take_decoded(node.machine.gaps_so_far(request_id, now), now)
        node.landed.discard(journey.index)
        self.loads.cancel(request_id, now)
        self._again(journey, broken, now)

    @property
    def counters(self) -> dict[str, float]:
        return super().counters | {"undivided": self._num_undivided}

    def validate(self) -> None:
        super().validate()
        for request_id in self._prompts:
            journey = self._journey_of[request_id]
            assert journey.placement is not None
            assert journey.placement.is_undivided
            assert journey.phase is Phase.PREFILLING
