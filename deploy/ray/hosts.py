"""Ray's nodes as the controller knows them: which may be used, which are lost, and which processes have a place there.
Pure; `now` is monotonic seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.plan import Kind
from deploy.ray.config import ClusterConfig, Share
from deploy.ray.events import READY, Host, Report
from deploy.ray.units import Unit, share_of

_ROUNDING = 1e-4  # Ray counts resources in ten-thousandths


# Those that the conductor knows: a restarted one counts once it has registered again.
_MEMBERS = {Kind.STORE, Kind.PREFILL, Kind.DECODE}


@dataclass(slots=True, eq=False)
class Process:
    """A unit that has a place."""

    unit: Unit
    name: str
    node_id: str
    generation: int
    report: Report | None = None  # None until its actor has answered
    silent_since: float | None = None
    is_leaving: bool = False
    life: int = 0  # deliberate restarts that its actor was asked for
    epoch: int = 0  # under which the conductor knows it; 0 = it does not
    epoch_before: int = 0  # under which it was known when it was told to restart

    @property
    def is_ready(self) -> bool:
        report = self.report
        return report is not None and report.stage == READY and report.life >= self.life

    @property
    def serves(self) -> bool:
        """Whether it is ready and, where that matters, the conductor knows so."""
        return self.is_ready and (self.unit.kind not in _MEMBERS or self.epoch not in (0, self.epoch_before))


def fits(share: Share, host: Host, others: Iterable[Share]) -> bool:
    """Whether the host has so much beside the others."""
    taken: dict[str, float] = {}
    for other in others:
        for name, amount in other.bundle().items():
            taken[name] = taken.get(name, 0.0) + amount
    return all(
        host.resources.get(name, 0.0) - taken.get(name, 0.0) >= amount - _ROUNDING
        for name, amount in share.bundle().items()
    )


def choose_host(config: ClusterConfig, kind: Kind, hosts: Sequence[Host], placed: Sequence[Process]) -> Host | None:
    """Of those with room: the fewest of its kind, then the fewest processes, Ray's head last, since all ends with it.
    None where there is no room. Processes of others on these hosts are not known here: Ray then refuses."""
    here = {host.node_id: [p.unit.kind for p in placed if p.node_id == host.node_id] for host in hosts}

    def crowd(host: Host) -> tuple[int, int, bool, str]:
        kinds = here[host.node_id]
        return kinds.count(kind), len(kinds), host.is_head, host.node_id

    share = share_of(config, kind)
    shares = {each: [share_of(config, other) for other in kinds] for each, kinds in here.items()}
    able = [host for host in hosts if fits(share, host, shares[host.node_id])]
    return min(able, key=crowd, default=None)


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
        # By node id, in the order of their coming; never used again.
        self.numbers: dict[str, int] = {}

    def __iter__(self) -> Iterator[Host]:
        """The head first."""
        return iter(sorted(self._hosts.values(), key=_order))

    def see(self, hosts: Sequence[Host], now: float) -> None:
        """All of them, as of now."""
        self._seen_at = now
        self._hosts = {host.node_id: host for host in hosts}
        self._silent_since = {
            host.node_id: self._silent_since.get(host.node_id, now) for host in hosts if not host.answers
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
            host for host in self if host.answers and now >= self._refused_until.get((host.node_id, kind), -math.inf)
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
