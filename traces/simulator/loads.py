"""KV on its way between machines: prefixes to the machines that will use them, handoffs from prefill to decode.

What a prefill machine has itself comes over its device link (and from its disk first, where it lies there), the rest
from the store nodes that the placement names, as far as they still have it, all at once. Fetched blocks go into the
machine's own store: that is how replicas come about. A source that dies leaves the rest to be computed.

A handoff goes layer by layer while it is computed: each chunk's KV is a flow that begins with the chunk's computation
and cannot end before it; a prefix that was loaded goes with the first chunk. It is complete when everything is computed
and carried. Knows neither queues nor placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.keys import BlockKey
from protocol.request import PrefixSource
from traces.simulator.machines import DecodeNode, PrefillNode
from traces.simulator.network import FlowId, Network
from traces.simulator.pool import Held


@dataclass(slots=True, eq=False)
class _Part:
    """Consecutive blocks from one machine."""

    source: PrefillNode
    held: Held
    flows: set[FlowId]
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """One prompt's prefix."""

    request_id: str
    node: PrefillNode | DecodeNode  # a decode node has no store
    keys: Sequence[BlockKey]
    parts: list[_Part] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return not any(part.flows for part in self.parts)


class Loaded(NamedTuple):
    """A prompt's prefix is there, as much of it as could be had."""

    node: PrefillNode | DecodeNode
    request_id: str
    num_blocks: int


class PrefixLoads:
    """All that are under way."""

    def __init__(self, network: Network, stores: Mapping[str, PrefillNode], block_bytes: int) -> None:
        """`stores`: the machines by the names of their store nodes."""
        self._network = network
        self._stores = stores
        self._block_bytes = block_bytes
        self._loads: dict[str, _Load] = {}
        self._of_flow: dict[FlowId, tuple[_Load, _Part]] = {}
        self.blocks_local = 0  # read by machines from what they had themselves
        self.blocks_fetched = 0

    def begin(
        self,
        request_id: str,
        node: PrefillNode | DecodeNode,
        keys: Sequence[BlockKey],
        sources: Sequence[PrefixSource],
        now: float,
    ) -> Loaded | None:
        """Reads what of the blocks `keys` can be had; None = it takes a while, see `flow_ended`."""
        load = self._loads[request_id] = _Load(request_id, node, keys)
        position = 0
        if isinstance(node, PrefillNode):
            position = self._add(load, node, 0, len(keys), now)
        for source in sources:
            end = source.first_block + source.num_blocks
            holder = self._stores[source.store.instance_id]
            if end <= position:
                continue
            if source.first_block > position or not holder.is_alive or holder is node:
                break
            position = self._add(load, holder, position, end, now)
            if position < end:
                break
        return self._finish(load) if load.is_done else None

    def flow_ended(self, flow_id: FlowId) -> Loaded | None:
        """A flow of the network ended; None = it was none of these, or not the last one."""
        load, part = self._of_flow.pop(flow_id, (None, None))
        if load is None or part is None:
            return None
        part.flows.discard(flow_id)
        return self._finish(load) if load.is_done else None

    def cancel(self, request_id: str, now: float) -> None:
        """Nobody wants this prefix any more; no-op when none is under way."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            for part in load.parts:
                self._stop(part, now)
                part.source.store.let_go(part.held)

    def source_died(self, node: PrefillNode, now: float) -> list[Loaded]:
        """Reads from this machine end; what came after them would have a gap before it."""
        done: list[Loaded] = []
        for load in list(self._loads.values()):
            died = [i for i, part in enumerate(load.parts) if part.source is node and part.flows]
            if not died or load.node is node:
                continue
            for part in load.parts[died[0] :]:
                self._stop(part, now)
                part.failed = True
            if load.is_done:
                done.append(self._finish(load))
        return done

    def _add(self, load: _Load, source: PrefillNode, first: int, end: int, now: float) -> int:
        """Begins to read blocks from one machine; returns where its run ends."""
        held = source.store.hold(load.keys[first:end])
        if not len(held):
            return first
        part = _Part(source, held, set())
        load.parts.append(part)
        name = source.name
        path = [f"{load.node.name}/device"]
        if source is not load.node:
            path = [f"{name}/out", f"{load.node.name}/in", *path]
        num_on_disk = held.num_on_disk
        for links, num_blocks in (
            (path, len(held) - num_on_disk),
            ([f"{name}/disk", *path], num_on_disk),
        ):
            if num_blocks:
                flow = self._network.start(links, num_blocks * self._block_bytes, now)
                part.flows.add(flow)
                self._of_flow[flow] = (load, part)
        return first + len(held)

    def _finish(self, load: _Load) -> Loaded:
        self._loads.pop(load.request_id)
        good = [part for part in load.parts if not part.failed]
        own = sum(len(part.held) for part in good if part.source is load.node)
        num_blocks = sum(len(part.held) for part in good)
        self.blocks_local += own
        self.blocks_fetched += num_blocks - own
        if isinstance(load.node, PrefillNode):
            load.node.store.put(load.keys[:num_blocks], own)
        for part in load.parts:
            part.source.store.let_go(part.held)
        return Loaded(load.node, load.request_id, num_blocks)

    def _stop(self, part: _Part, now: float) -> None:
        for flow in sorted(part.flows):
            self._network.cancel(flow, now)
            del self._of_flow[flow]
        part.flows.clear()

    def held_at(self, node: PrefillNode) -> list[Held]:
        """What is being read from a machine; for its store's proof."""
        parts = (part for load in self._loads.values() for part in load.parts)
        return [part.held for part in parts if part.source is node]

    def validate(self) -> None:
        """Raises AssertionError unless every flow belongs to exactly one part of a load under way."""
        flows = [(flow, load, part) for load in self._loads.values() for part in load.parts for flow in part.flows]
        assert len(flows) == len(self._of_flow)
        assert all(self._of_flow[flow] == (load, part) for flow, load, part in flows)
        assert not any(load.is_done for load in self._loads.values()), "a load waits for nothing"


@dataclass(slots=True, eq=False)
class _Handoff:
    """One prompt's KV."""

    flows: set[FlowId] = field(default_factory=set)
    is_computed: bool = False


class Handoffs:
    """All that are under way, by request."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handoffs: dict[str, _Handoff] = {}
        self._of_flow: dict[FlowId, str] = {}

    def send(self, request_id: str, source: str, target: str, num_bytes: int, ends_at: float, now: float) -> None:
        """A chunk's KV, which comes into being until `ends_at`, from one machine to another."""
        links = [f"{source}/out", f"{target}/in"]
        flow = self._network.start(links, num_bytes, now, not_before=ends_at)
        self._handoffs.setdefault(request_id, _Handoff()).flows.add(flow)
        self._of_flow[flow] = request_id

    def computed(self, request_id: str) -> bool:
        """The whole prompt is; whether everything has been carried too."""
        self._handoffs[request_id].is_computed = True
        return self._is_complete(request_id)

    def flow_ended(self, flow_id: FlowId) -> str | None:
        """A flow of the network ended: the request whose handoff is complete with it, if any."""
        request_id = self._of_flow.pop(flow_id, None)
        if request_id is None:
            return None
        self._handoffs[request_id].flows.discard(flow_id)
        return request_id if self._is_complete(request_id) else None

    def cancel(self, request_id: str, now: float) -> None:
        """Nobody wants it any more; no-op when nothing is under way."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is not None:
            for flow in sorted(handoff.flows):
                self._network.cancel(flow, now)
                del self._of_flow[flow]

    def _is_complete(self, request_id: str) -> bool:
        handoff = self._handoffs[request_id]
        if handoff.flows or not handoff.is_computed:
            return False
        del self._handoffs[request_id]
        return True

    def validate(self) -> None:
        """Raises AssertionError unless every flow is one handoff's, and none waits for nothing."""
        flows = {flow: name for name, each in self._handoffs.items() for flow in each.flows}
        assert flows == self._of_flow
        assert all(each.flows or not each.is_computed for each in self._handoffs.values())
