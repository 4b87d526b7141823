"""RPC channels with a long timeout, for tests that are not about giving up on slow peers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from moonserve.protocol.rpc.grpc_transport import Channels
from tests.patience import PATIENCE_S

Reply = TypeVar("Reply")


class PatientChannels(Channels):
    """Channels whose calls wait long for a reply; a peer that is gone is still noticed at once."""

    async def call(self, method: Callable[..., Awaitable[Reply]], request: Any, **options: Any) -> Reply:
        return await super().call(method, request, **{**options, "timeout_s": PATIENCE_S})
