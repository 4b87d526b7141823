"""A cluster whose decode machines prefill prompts themselves if the conductor decides so, as live workers do.

See docs/conditional-disaggregation.md. The decode machine reserves the prompt's blocks like landing blocks, loads the
prefix from the stores over the network, and computes the rest in chunks next to decode steps. The new blocks are then
put into the store that the prefix came from, so that chains stay together, or into the stores in turn if nothing was
read. A put is lost if its store dies. Not modelled: blocks in the decode machines' own device memory.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import Placement
from moonserve.traces.simulator.cluster.disaggregated import DisaggregatedCluster
from moonserve.traces.simulator.cluster.kv_transfers import Loaded
from moonserve.traces.simulator.cluster.nodes import DecodeNode, Node, PrefillNode
from moonserve.traces.simulator.cluster.request_state import Phase, RequestState
from moonserve.traces.simulator.decode import DecodeOutcome, LandingGranted
from moonserve.traces.simulator.network import FlowId
from moonserve.traces.simulator.prefill import Prompt
from moonserve.traces.simulator.sequence import FirstToken
from moonserve.traces.simulator.spec import ClusterSpec


class _Put(NamedTuple):
    """New blocks in flight to a store."""

    target: PrefillNode
    keys: Sequence[BlockKey]  # of the whole chain
    first: int  # position of the first new block


class ConditionalCluster(DisaggregatedCluster):
    """A cluster with undivided requests: `_prompts` has the prompts that decode machines read, by request."""

    def __init__(self, spec: ClusterSpec, requests: Sequence[RequestState]) -> None:
        """Raises ConfigError for an invalid spec."""
        super().__init__(spec, requests)
        self._prompts: dict[str, Prompt] = {}  # until their first token
        self._puts: dict[FlowId, _Put] = {}
        self._num_undivided = 0

    # -- life of a request

    def _begin(self, request: RequestState, now: float) -> None:
        if not request.placed.is_local_prefill:
            super()._begin(request, now)
            return
        node, request_id = self._decode_node_of(request), request.request_id
        if not node.is_alive:
            self._end_attempt(request, node, now)
            return
        self._request_of[request_id] = request
        self._num_undivided += 1
        self._prompts[request_id] = Prompt(
            request_id=request_id, rank=(0,), num_tokens=request.num_tokens, submitted_at=now
        )
        self._on_decode_outcomes(node, node.machine.reserve(request_id, request.num_tokens, now), now)

    def _decode_node_of(self, request: RequestState) -> DecodeNode:
        node = self._nodes[request.placed.decode.instance_id]
        assert isinstance(node, DecodeNode)
        return node

    def _on_decode_outcomes(self, node: DecodeNode, outcomes: Iterable[DecodeOutcome], now: float) -> None:
        self._wakes.touch(node)
        for outcome in outcomes:
            if isinstance(outcome, FirstToken):
                self._sampled(node, outcome, now)
            elif isinstance(outcome, LandingGranted) and outcome.request_id in self._prompts:
                self._load_prefix(node, self._request_of[outcome.request_id], now)
            else:
                super()._on_decode_outcomes(node, [outcome], now)

    def _loaded(self, loaded: Loaded, now: float) -> None:
        node = loaded.node
        if not isinstance(node, DecodeNode):
            super()._loaded(loaded, now)
            return
        request, prompt = self._request_of[loaded.request_id], self._prompts[loaded.request_id]
        prompt.loaded_at, prompt.cached = now, loaded.num_blocks * self._block_size
        outcomes = node.machine.read(loaded.request_id, prompt.num_tokens, prompt.cached, request.num_remaining, now)
        self._on_decode_outcomes(node, outcomes, now)

    def _sampled(self, node: DecodeNode, outcome: FirstToken, now: float) -> None:
        """Takes the first token of a computed prompt and puts its KV into a store."""
        sequence = outcome.sequence
        request = self._request_of[sequence.request_id]
        prompt = self._prompts.pop(sequence.request_id)
        assert sequence.begun_at is not None
        prompt.load_s = prompt.loaded_at - prompt.submitted_at
        prompt.started_at, prompt.compute_s = sequence.begun_at, sequence.prefill_s
        request.phase = Phase.DECODING
        node.landed.add(request.index)
        keys = request.keys[: prompt.num_tokens // self._block_size]
        if request.num_remaining > 1:
            self.gateway.first_token(request, prompt, outcome.at)
        else:  # `Finished` follows and ends the request
            request.cached_tokens, request.prefill_s = prompt.cached, prompt.compute_s
            request.take_token(outcome.at)
        self._put(node, request, keys, prompt.cached // self._block_size, now)

    def _put(
        self,
        node: DecodeNode,
        request: RequestState,
        keys: Sequence[BlockKey],
        num_cached: int,
        now: float,
    ) -> None:
        target = self._store_for_new_blocks(request.placed)
        num_new = len(keys) - num_cached
        if not num_new or not target.is_alive:
            return
        links = [f"{node.name}/out", f"{target.name}/in"]
        flow = self.network.start(links, num_new * self._block_bytes, now)
        self._puts[flow] = _Put(target, keys, num_cached)

    def _store_for_new_blocks(self, placement: Placement) -> PrefillNode:
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

    def _runs_on(self, request: RequestState, node: Node) -> bool:
        if request.placed.is_local_prefill:
            return node.name == request.placed.decode.instance_id
        return super()._runs_on(request, node)

    def _end_attempt(self, request: RequestState, broken: Node, now: float) -> None:
        if not request.placed.is_local_prefill:
            super()._end_attempt(request, broken, now)
            return
        node, request_id = self._decode_node_of(request), request.request_id
        self._request_of.pop(request_id, None)
        if self._prompts.pop(request_id, None) is None:
            request.take_tokens(node.machine.gaps_so_far(request_id, now), now)
        node.landed.discard(request.index)
        self.loads.cancel(request_id, now)
        self._place_again(request, broken, now)

    @property
    def counters(self) -> dict[str, float]:
        return super().counters | {"undivided": self._num_undivided}

    def validate(self) -> None:
        super().validate()
        for request_id in self._prompts:
            request = self._request_of[request_id]
            assert request.placed.is_local_prefill
            assert request.phase is Phase.PREFILLING
