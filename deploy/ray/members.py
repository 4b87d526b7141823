"""The cluster as its conductor knows it, for the controller: who is there, and how loaded."""

from __future__ import annotations

from conductor.roles.controller import WorkerLoad
from deploy.ray.events import Member
from protocol.conductors import Conductors
from protocol.ids import InstanceId, Role
from protocol.pb import conductor_pb2
from protocol.rpc import Channels
from protocol.tls import Certificates
from protocol.wire import role_from_wire

_TIMEOUT_S = 2.0


class Members:
    """Asks whoever leads. Used in one event loop."""

    def __init__(self, cluster_token: str, tls: Certificates | None) -> None:
        self._channels = Channels(cluster_token, tls)
        self._conductors: Conductors | None = None

    async def seen(self, addresses: str) -> list[Member]:
        """`addresses`: of all conductors, always the same. Raises MoonserveError when none of them answers."""
        if self._conductors is None:
            self._conductors = Conductors(self._channels, addresses)
        view = await self._conductors.call(
            lambda conductor: conductor.GetCluster,
            conductor_pb2.GetClusterRequest(),
            timeout_s=_TIMEOUT_S,
        )
        return [_member(instance) for instance in view.instances]


def _member(view: conductor_pb2.InstanceView) -> Member:
    role = role_from_wire(view.role)
    instance_id = InstanceId(view.endpoint.instance_id)
    load = WorkerLoad(
        instance_id=instance_id,
        role=role,
        can_change=view.can_switch_role,
        draining=view.draining,
        need=view.need,
        use=view.use,
    )
    return Member(
        instance_id=instance_id,
        epoch=view.endpoint.epoch,
        load=None if role is Role.STORE else load,
    )
