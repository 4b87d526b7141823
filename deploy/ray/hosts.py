"""Ray's nodes as the controller knows them: which may be used, which are lost. Pure; `now` is monotonic seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from deploy.ray.events import Host
from deploy.ray.units import Kind

# A host that could not take a process is not asked again at once.
REFUSAL_S = 10.0


class Hosts:
    """Those that Ray believes alive. One whose raylet has not answered for `silence_s` is lost: Ray itself notices that
    only after a quarter of a minute."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._hosts: dict[str, Host] = {}
        self._silent_since: dict[str, float] = {}
        self._seen_at = -math.inf
        self._refused_until: dict[tuple[str, Kind], float] = {}
        self.numbers: dict[
            str, int
        ] = {}  # by node id, in the order of their coming, never used again

    def __iter__(self) -> Iterator[Host]:
        """The head first."""
        return iter(sorted(self._hosts.values(), key=_order))

    def see(self, hosts: Sequence[Host], now: float) -> None:
        """All of them, as of now."""
        self._seen_at = now
        self._hosts = {host.node_id: host for host in hosts}
        self._silent_since = {
            host.node_id: self._silent_since.get(host.node_id, now)
            for host in hosts
            if not host.answers
        }
        for host in self:
            self.numbers.setdefault(host.node_id, len(self.numbers))

    def refuse(self, node_id: str, kind: Kind, now: float) -> None:
        """It could not take a process of this kind."""
        self._refused_until[node_id, kind] = now + REFUSAL_S

    def is_lost(self, node_id: str) -> bool:
        """Whether it is gone, or had been silent for long when all were seen last."""
        silent_since = self._silent_since.get(node_id, math.inf)
        return node_id not in self._hosts or self._seen_at - silent_since >= self._silence_s

    def open_to(self, kind: Kind, now: float) -> list[Host]:
        """Those that answer and have not refused such a process lately."""
        return [
            host
            for host in self
            if host.answers and now >= self._refused_until.get((host.node_id, kind), -math.inf)
        ]

    def address_of(self, node_id: str) -> str:
        """Empty for one that is gone."""
        host = self._hosts.get(node_id)
        return host.address if host is not None else ""

    def restore(self, numbers: Mapping[str, int]) -> None:
        self.numbers = dict(numbers)

    def validate(self) -> None:
        assert set(self._hosts) <= set(self.numbers)
        assert set(self._silent_since) <= set(self._hosts)
        assert len(set(self.numbers.values())) == len(self.numbers)


def _order(host: Host) -> tuple[bool, str]:
    return not host.is_head, host.node_id
