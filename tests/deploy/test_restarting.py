"""In which order processes give way to their successors, and what the next one waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from deploy import restarting
from deploy.plan import Kind, ProcessSpec
from deploy.restarting import RollingRestart
from deploy.supervisor import Child, Supervisor
from protocol.errors import NoWorker, PeerLost
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from protocol.rpc import Channels, RpcServer
from tests.patience import PATIENCE_S

TOKEN = "restarting-tests"


class Scene(conductor_pb2_grpc.ConductorServicer):
    """A conductor and a supervisor of two workers. The one that was restarted is back once it was asked for twice."""

    def __init__(self, tmp_path: Path, silent_for: int) -> None:
        self.children = [
            Child(ProcessSpec(kind=kind, module="it", instance_id=f"{kind}-0", flags=()), tmp_path)
            for kind in (Kind.DECODE, Kind.PREFILL)
        ]
        self.epochs = {child.spec.instance_id: 1 for child in self.children}
        self.silent_for = silent_for  # calls
        self.away: list[str] = []  # entries go by calls
        self.events: list[str] = []

    async def GetCluster(self, request: Any, context: Any) -> conductor_pb2.ClusterView:
        if self.silent_for:
            self.silent_for -= 1
            raise PeerLost("nobody leads")
        members = [
            conductor_pb2.InstanceView(endpoint=common_pb2.Endpoint(instance_id=name, epoch=epoch))
            for name, epoch in self.epochs.items()
            if name not in self.away
        ]
        if self.away:
            name = self.away.pop()
            if not self.away:
                self.events.append(f"{name} is back")
        return conductor_pb2.ClusterView(instances=members)

    async def restart(self, child: Child) -> None:
        name = child.spec.instance_id
        self.events.append(f"{name} is restarted")
        self.epochs[name] += 1
        self.away = [name, name]

    async def run(self) -> list[str]:
        server = RpcServer(TOKEN)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, server.grpc)
        address = await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(PATIENCE_S):
                supervisor = cast(Supervisor, self)
                await RollingRestart(supervisor, address, lambda: Channels(TOKEN)).run()
        finally:
            await server.stop(0.0)
        return self.events


@pytest.mark.parametrize("silent_for", [0, 2])
async def test_the_next_one_goes_when_the_one_before_is_back(tmp_path: Path, silent_for: int) -> None:
    """A conductor that does not answer just then is asked again: it would say of nobody that they were there."""
    assert await Scene(tmp_path, silent_for).run() == [
        *("prefill-0 is restarted", "prefill-0 is back"),
        *("decode-0 is restarted", "decode-0 is back"),
    ]


async def test_nothing_is_restarted_while_nobody_says_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarting, "BACK_WITHIN_S", 0.2)
    scene = Scene(tmp_path, 10**6)
    with pytest.raises(NoWorker, match="no conductor said"):
        await scene.run()
    assert not scene.events
