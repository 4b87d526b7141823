"""gRPC over the simulated network, for the product's generated stubs and servicers, in bytes.

It fails as gRPC does: a refused or broken connection is UNAVAILABLE, silence ends at the call's deadline or, where a
link stays cut or a peer stopped, by keepalive; a server learns of a caller that went away and cancels its handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.rpc import Channels
from tests.simulation.loop import Life
from tests.simulation.network import Network
from tests.simulation.streams import Stream
from tests.simulation.unary import Call


class SimulatedChannels(Channels):
    """The product's, over a simulated network."""

    def __init__(self, network: Network, life: Life) -> None:
        super().__init__("token")
        self._network = network
        self._life = life

    def _open(self, address: str) -> Any:
        return _Channel(self._network, self._life, address)


class _Channel:
    """What generated stubs need of one."""

    def __init__(self, network: Network, life: Life, address: str) -> None:
        self._network, self._life, self._address = network, life, address

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        async def call(request: Any, *, timeout: float, metadata: Any = (), wait_for_ready: bool = False) -> Any:
            asked = Call(self._network, self._life, self._address, path, request_serializer(request), timeout)
            return response_deserializer(await asked.answer(wait_for_ready))

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        def call(request: Any, *, metadata: Any = ()) -> Stream:
            data = request_serializer(request)
            return Stream(self._network, self._life, self._address, path, data, response_deserializer)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Calls end by themselves here."""
