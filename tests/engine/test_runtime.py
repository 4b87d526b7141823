"""EngineThread: steps in order, in one thread, never abandoned half-way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.runtime import EngineThread
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt
from tests.patience import PATIENCE_S


async def test_a_cancelled_caller_is_let_go_only_after_its_step(llama: Pair) -> None:
    runtime = EngineThread(llama.engine(num_blocks=4))
    started, proceed = threading.Event(), threading.Event()
    layers: list[int] = []

    def on_layer(layer: int) -> None:
        started.set()
        assert proceed.wait(timeout=PATIENCE_S)
        layers.append(layer)

    task = asyncio.create_task(runtime.execute([make_slice(random_prompt(5), 0, 5, [0])], on_layer))
    await asyncio.to_thread(started.wait, PATIENCE_S)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert layers == [0, 1]
    runtime.close()
