"""EngineThread: steps in order, in one thread, never abandoned half-way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.runtime import EngineThread
from protocol.errors import InvalidRequest
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt
from tests.patience import PATIENCE_S


async def test_steps_run_in_the_engines_own_thread_and_errors_reach_the_caller(llama: Pair) -> None:
    runtime = EngineThread(llama.engine(num_blocks=4))
    threads: set[str] = set()
    prompt = random_prompt(10)
    step = [make_slice(prompt, 0, 10, [0])]
    [first] = await runtime.execute(step, lambda _: threads.add(threading.current_thread().name))
    [second] = await runtime.execute(step)
    assert first == second
    assert len(threads) == 1
    assert threading.current_thread().name not in threads
    with pytest.raises(InvalidRequest):
        await runtime.execute([make_slice([1], 0, 2, [0])])
    runtime.close()


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
