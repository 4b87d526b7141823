"""Which gateways there are: those that have asked for the view of the cluster lately. Pure.

They ask once a second anyway, so they need no membership of their own; nothing is decided by them. Clients and
dashboards that reach one gateway learn of the others from here.
"""

from __future__ import annotations

from dataclasses import dataclass

LIFETIME_S = 5.0  # gateways ask once a second, ten times while there are no workers
_MOST = 1_000  # asking needs the cluster's token, so this is for our own bugs


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayView:
    """One gateway, as it told."""

    instance_id: str
    rpc_address: str
    host: str  # equal for processes of one machine
    num_requests: int  # choices under way


class SeenGateways:
    """By instance id; `now` in monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, GatewayView]] = {}

    def saw(self, gateway: GatewayView, now: float) -> None:
        """It has asked; what it told before is forgotten."""
        if gateway.instance_id in self._seen or len(self._seen) < _MOST:
            self._seen[gateway.instance_id] = (now, gateway)

    def present(self, now: float) -> list[GatewayView]:
        """By id; those who are silent are forgotten."""
        self._seen = {id: seen for id, seen in self._seen.items() if now - seen[0] < LIFETIME_S}
        return [self._seen[instance_id][1] for instance_id in sorted(self._seen)]
