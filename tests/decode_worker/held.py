"""Decode workers whose steps a test lets go: their requests are under way for as long as it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_worker.events import StepDone, StepFailed
from decode_worker.stepping import Stepping


def hold_steps(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Each `release` lets one step say what it computed."""
    let_go, outcomes = asyncio.Semaphore(0), Stepping.outcomes

    async def held(stepping: Stepping) -> AsyncIterator[StepDone | StepFailed]:
        async for outcome in outcomes(stepping):
            await let_go.acquire()
            yield outcome

    monkeypatch.setattr(Stepping, "outcomes", held)
    return let_go
