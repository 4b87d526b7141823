"""On which host a process goes: the one that has the fewest of its kind. Pure; resources are Ray's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.ray.config import Share
from deploy.ray.events import Host
from deploy.ray.units import Kind

_ROUNDING = 1e-4  # Ray counts resources in ten-thousandths


@dataclass(frozen=True, slots=True)
class Placed:
    """A process that has a place already."""

    node_id: str
    kind: Kind
    share: Share


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


def choose_host(
    share: Share, kind: Kind, hosts: Sequence[Host], placed: Sequence[Placed]
) -> Host | None:
    """Of those with room: the fewest of its kind, then the fewest processes, Ray's head last, since all ends with it.
    None where there is no room. Processes of others on these hosts are not known here: Ray then refuses."""

    def crowd(host: Host) -> tuple[int, int, bool, str]:
        here = [each for each in placed if each.node_id == host.node_id]
        same = sum(each.kind is kind for each in here)
        return same, len(here), host.is_head, host.node_id

    able = [
        host
        for host in hosts
        if fits(share, host, [each.share for each in placed if each.node_id == host.node_id])
    ]
    return min(able, key=crowd, default=None)
