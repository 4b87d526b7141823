"""Hosts of the Ray cluster as the controller knows them: usable hosts, lost hosts, and the processes placed on them.
Pure; `now` is monotonic seconds."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.ray.config import ClusterConfig, Share
from moonserve.deploy.ray.events import READY, Host, Report
from moonserve.deploy.ray.processes import PlannedProcess, resources_of

_ROUNDING = 1e-4  # Ray counts resources in ten-thousandths


# Kinds that register with the conductor: a restarted process serves once it has registered again.
_MEMBERS = {ProcessKind.STORE, ProcessKind.PREFILL, ProcessKind.DECODE}


@dataclass(slots=True, eq=False)
class Process:
    """A unit that is placed on a host."""

    unit: PlannedProcess
    name: str
    node_id: str
    generation: int
    report: Report | None = None  # None until its actor has answered
    silent_since: float | None = None
    is_leaving: bool = False
    life: int = 0  # deliberate restarts requested from its actor
    epoch: int = 0  # at the conductor; 0 = not registered
    epoch_before: int = 0  # at the conductor when its last restart was requested

    @property
    def is_ready(self) -> bool:
        report = self.report
        return report is not None and report.stage == READY and report.life >= self.life

    @property
    def serves(self) -> bool:
        """True if it is ready and, if its kind registers with the conductor, has done so since its restart."""
        return self.is_ready and (self.unit.kind not in _MEMBERS or self.epoch not in (0, self.epoch_before))


def fits(share: Share, host: Host, others: Iterable[Share]) -> bool:
    """Returns True if the host has room for this share in addition to the others."""
    taken: dict[str, float] = {}
    for other in others:
        for name, amount in other.bundle().items():
            taken[name] = taken.get(name, 0.0) + amount
    return all(
        host.resources.get(name, 0.0) - taken.get(name, 0.0) >= amount - _ROUNDING
        for name, amount in share.bundle().items()
    )


def choose_host(
    config: ClusterConfig, kind: ProcessKind, hosts: Sequence[Host], placed: Sequence[Process]
) -> Host | None:
    """Returns the host with room that has the fewest processes of this kind, then the fewest in all. Ray's head comes
    last, because everything ends with it. None = no room. Room taken by others is unknown here: Ray then refuses."""
    here = {host.node_id: [p.unit.kind for p in placed if p.node_id == host.node_id] for host in hosts}

    def crowd(host: Host) -> tuple[int, int, bool, str]:
        kinds = here[host.node_id]
        return kinds.count(kind), len(kinds), host.is_head, host.node_id

    share = resources_of(config, kind)
    shares = {each: [resources_of(config, other) for other in kinds] for each, kinds in here.items()}
    able = [host for host in hosts if fits(share, host, shares[host.node_id])]
    return min(able, key=crowd, default=None)


# Time until a host that could not take a process is tried again.
REFUSAL_S = 10.0


class Hosts:
    """Hosts that Ray considers alive. A host whose raylet has not answered for `silence_s` is lost: Ray itself notices
    that only after a quarter of a minute."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._hosts: dict[str, Host] = {}
        self._silent_since: dict[str, float] = {}
        self._seen_at = -math.inf
        self._refused_until: dict[tuple[str, ProcessKind], float] = {}
        # Numbers by node id, in order of arrival; never reused.
        self.numbers: dict[str, int] = {}

    def __iter__(self) -> Iterator[Host]:
        """Iterates over the hosts, the head first."""
        return iter(sorted(self._hosts.values(), key=lambda host: (not host.is_head, host.node_id)))

    def observe(self, hosts: Sequence[Host], now: float) -> None:
        """Replaces the hosts by those that were seen at `now`."""
        self._seen_at = now
        self._hosts = {host.node_id: host for host in hosts}
        self._silent_since = {
            host.node_id: self._silent_since.get(host.node_id, now) for host in hosts if not host.answers
        }
        for host in self:
            self.numbers.setdefault(host.node_id, len(self.numbers))

    def refuse(self, node_id: str, kind: ProcessKind, now: float) -> None:
        """Notes that the host could not take a process of this kind."""
        self._refused_until[node_id, kind] = now + REFUSAL_S

    def is_lost(self, node_id: str) -> bool:
        """Returns True if the host is gone, or had been silent for `silence_s` when hosts were last seen."""
        silent_since = self._silent_since.get(node_id, math.inf)
        return node_id not in self._hosts or self._seen_at - silent_since >= self._silence_s

    def usable_for(self, kind: ProcessKind, now: float) -> list[Host]:
        """Returns the hosts that answer and have not refused a process of this kind lately."""
        return [
            host for host in self if host.answers and now >= self._refused_until.get((host.node_id, kind), -math.inf)
        ]

    def address_of(self, node_id: str) -> str:
        """Returns the host's address, or "" if it is gone."""
        host = self._hosts.get(node_id)
        return host.address if host is not None else ""

    def validate(self) -> None:
        assert set(self._hosts) <= set(self.numbers)
        assert set(self._silent_since) <= set(self._hosts)
        assert len(set(self.numbers.values())) == len(self.numbers)
