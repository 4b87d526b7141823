"""KV in flight between machines: prefixes to the machines that use them, and handoffs from prefill to decode.

A prefill machine reads its own blocks over its device link (from its disk first if they are there). It reads the other
blocks in parallel from the store nodes that the placement names, as far as they still have them. Fetched blocks enter
its own store, which is how replicas arise. If a source dies, the rest is computed.

A handoff is sent layer by layer during the computation: each chunk's KV is a flow that starts with the chunk's
computation and cannot end before it. A loaded prefix is sent with the first chunk. The handoff is complete when
everything is computed and transferred. Knows neither queues nor placements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import PrefixSource
from moonserve.traces.simulator.cluster.nodes import DecodeNode, PrefillNode
from moonserve.traces.simulator.network import FlowId, Network
from moonserve.traces.simulator.pool import BlockLease


@dataclass(slots=True, eq=False)
class _SourcePart:
    """Consecutive blocks read from one machine."""

    source: PrefillNode
    held: BlockLease
    flows: set[FlowId]
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one prompt's prefix."""

    request_id: str
    node: PrefillNode | DecodeNode  # a decode node has no store
    keys: Sequence[BlockKey]
    parts: list[_SourcePart] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return not any(part.flows for part in self.parts)


class Loaded(NamedTuple):
    """A prompt's prefix has arrived, as far as it was available."""

    node: PrefillNode | DecodeNode
    request_id: str
    num_blocks: int


class PrefixLoads:
    """All prefix loads in flight."""

    def __init__(self, network: Network, stores: Mapping[str, PrefillNode], block_bytes: int) -> None:
        """`stores`: machines by the names of their store nodes."""
        self._network = network
        self._stores = stores
        self._block_bytes = block_bytes
        self._loads: dict[str, _Load] = {}
        self._of_flow: dict[FlowId, tuple[_Load, _SourcePart]] = {}
        self.blocks_local = 0  # read by machines from their own memory or disk
        self.blocks_fetched = 0

    def begin(
        self,
        request_id: str,
        node: PrefillNode | DecodeNode,
        keys: Sequence[BlockKey],
        sources: Sequence[PrefixSource],
        now: float,
    ) -> Loaded | None:
        """Starts to read the blocks `keys` as far as they are available. None = in flight, see `flow_ended`."""
        load = self._loads[request_id] = _Load(request_id, node, keys)
        position = self._add(load, node, 0, len(keys), now) if isinstance(node, PrefillNode) else 0
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
        """Takes a finished flow. None = it belongs to no load, or the load has other flows in flight."""
        load, part = self._of_flow.pop(flow_id, (None, None))
        if load is None or part is None:
            return None
        part.flows.discard(flow_id)
        return self._finish(load) if load.is_done else None

    def cancel(self, request_id: str, now: float) -> None:
        """Stops a load. No-op if none is in flight."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            for part in load.parts:
                self._stop(part, now)
                part.source.store.let_go(part.held)

    def source_died(self, node: PrefillNode, now: float) -> list[Loaded]:
        """Ends all reads from a dead machine. Blocks after them are dropped, because a prefix has no gaps."""
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
        """Starts to read blocks from one machine. Returns the position after the last of them."""
        held = source.store.hold(load.keys[first:end])
        if not len(held):
            return first
        part = _SourcePart(source, held, set())
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

    def _stop(self, part: _SourcePart, now: float) -> None:
        for flow in sorted(part.flows):
            self._network.cancel(flow, now)
            del self._of_flow[flow]
        part.flows.clear()

    def held_at(self, node: PrefillNode) -> list[BlockLease]:
        """Returns the blocks being read from a machine, for the validation of its store."""
        parts = (part for load in self._loads.values() for part in load.parts)
        return [part.held for part in parts if part.source is node]

    def validate(self) -> None:
        """Raises AssertionError unless every flow belongs to exactly one part of a load in flight."""
        flows = [(flow, load, part) for load in self._loads.values() for part in load.parts for flow in part.flows]
        assert len(flows) == len(self._of_flow)
        assert all(self._of_flow[flow] == (load, part) for flow, load, part in flows)
        assert not any(load.is_done for load in self._loads.values()), "a load waits for nothing"


@dataclass(slots=True, eq=False)
class _Handoff:
    """The handoff of one prompt's KV."""

    flows: set[FlowId] = field(default_factory=set)
    is_computed: bool = False


class Handoffs:
    """All handoffs in flight, by request."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handoffs: dict[str, _Handoff] = {}
        self._of_flow: dict[FlowId, str] = {}

    def send(self, request_id: str, source: str, target: str, num_bytes: int, ends_at: float, now: float) -> None:
        """Starts to send a chunk's KV to another machine. The chunk's computation ends at `ends_at`."""
        links = [f"{source}/out", f"{target}/in"]
        flow = self._network.start(links, num_bytes, now, not_before=ends_at)
        self._handoffs.setdefault(request_id, _Handoff()).flows.add(flow)
        self._of_flow[flow] = request_id

    def computed(self, request_id: str) -> bool:
        """Records that the whole prompt is computed. Returns True if everything is transferred too."""
        self._handoffs[request_id].is_computed = True
        return self._is_complete(request_id)

    def flow_ended(self, flow_id: FlowId) -> str | None:
        """Takes a finished flow. Returns the request whose handoff it completes, or None."""
        request_id = self._of_flow.pop(flow_id, None)
        if request_id is None:
            return None
        self._handoffs[request_id].flows.discard(flow_id)
        return request_id if self._is_complete(request_id) else None

    def cancel(self, request_id: str, now: float) -> None:
        """Stops a handoff. No-op if none is in flight."""
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
        """Raises AssertionError unless every flow belongs to one handoff and no handoff waits without cause."""
        flows = {flow: name for name, each in self._handoffs.items() for flow in each.flows}
        assert flows == self._of_flow
        assert all(each.flows or not each.is_computed for each in self._handoffs.values())
