"""KV on its way from prefill to decode machines, layer by layer while it is computed.

Each chunk's KV is a flow that begins with the chunk's computation and cannot end before it; a prefix that was loaded
goes with the first chunk. A handoff is complete when everything is computed and carried. Knows only bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.simulator.network import FlowId, Network


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

    def send(
        self, request_id: str, source: str, target: str, num_bytes: int, ends_at: float, now: float
    ) -> None:
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
