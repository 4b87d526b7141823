"""Calls that wait for who is slow, where what is tested is not how a peer is given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from protocol.rpc import Channels
from tests.patience import PATIENCE_S

Reply = TypeVar("Reply")


class PatientChannels(Channels):
    """Who is gone is noticed at once."""

    async def call(self, method: Callable[..., Awaitable[Reply]], request: Any, **options: Any) -> Reply:
        return await super().call(method, request, **{**options, "timeout_s": PATIENCE_S})
