"""The gateway's connections to workers."""

from __future__ import annotations

import asyncio

from gateway.cluster import Cluster
from protocol.ids import GatewayId
from protocol.request import Endpoint
from protocol.rpc import Channels


class RecordingChannels(Channels):
    """Tells which channels were closed."""

    def __init__(self) -> None:
        super().__init__("token")
        self.forgotten: asyncio.Queue[str] = asyncio.Queue()

    async def forget(self, address: str) -> None:
        await super().forget(address)
        self.forgotten.put_nowait(address)


def endpoint(name: str, epoch: int, port: int) -> Endpoint:
    return Endpoint(
        instance_id=name,
        epoch=epoch,
        rpc_address=f"127.0.0.1:{port}",
        transfer_address="",
        host="h",
    )


async def test_a_replaced_incarnation_is_lost_at_once_and_its_own_channel_closed() -> None:
    channels, lost = RecordingChannels(), list[str]()
    cluster = Cluster(
        channels,
        "127.0.0.1:1",
        GatewayId("g"),
        on_batch=lambda instance_id, batch: None,
        on_lost=lambda instance_id, error: lost.append(instance_id),
        on_view=lambda view: None,
    )
    cluster.listen(endpoint("d0", 1, 2))
    cluster.listen(endpoint("d1", 1, 3))
    cluster.listen(endpoint("d0", 1, 2))
    assert lost == []
    cluster.listen(endpoint("d0", 2, 4))
    assert lost == ["d0"]
    async with asyncio.timeout(10):
        assert await channels.forgotten.get() == "127.0.0.1:2"
    cluster.listen(endpoint("d1", 2, 3))  # at the same address, so that the channel stays
    cluster.listen(endpoint("d0", 3, 5))
    async with asyncio.timeout(10):
        assert await channels.forgotten.get() == "127.0.0.1:4"
    assert lost == ["d0", "d1", "d0"]
    assert channels.forgotten.empty()
    await cluster.close()
    await channels.close()
