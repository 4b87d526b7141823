"""Decode worker's service with real sockets, real memory and a tiny model."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from moonserve.decode_worker.service import MAX_RESERVE_WAIT_S, landing_ranges
from moonserve.protocol.errors import Cancelled, Incompatible, InvalidRequest, Overloaded, StaleLease
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.pb import worker_pb2
from moonserve.protocol.request import SamplingParams
from tests.decode_worker.world import World, hold_steps, prompt_of, until_counted, world
from tests.patience import PATIENCE_S, answered

T = TypeVar("T")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


async def refused(call: Awaitable[T], error: type[BaseException]) -> str:
    with pytest.raises(error) as caught:
        await asyncio.wait_for(call, PATIENCE_S)
    return str(caught.value)


async def until_queued(w: World, count: int) -> None:
    await answered(w.client.status, lambda status: status.load.num_waiting == count)


async def test_steps_that_run_ahead_and_neighbours_change_no_token(model_path: Path) -> None:
    """Holds for greedy and seeded sampling, with a penalty, and for ends by length and by a stop token."""
    seeded = replace(GREEDY, temperature=1.0, seed=5, presence_penalty=0.5)
    wishes = {3: GREEDY, 8: GREEDY, 12: seeded, 21: GREEDY}  # by the prompt's length
    async with world(model_path) as w:
        expected = {
            length: await w.complete(w.client.compute(prompt_of(length), 20, sampling=wish))
            for length, wish in wishes.items()
        }
    stop = expected[3][10]
    expected[3] = expected[3][: expected[3].index(stop) + 1]
    wishes[3] = replace(GREEDY, stop_token_ids=frozenset({stop}))
    async with world(model_path, runs_ahead=True) as w:
        prompts = {}
        for length, wish in wishes.items():
            prompts[length] = w.client.compute(prompt_of(length), 20, sampling=wish)
            await w.client.hand_off(prompts[length])
        for length, prompt in prompts.items():
            assert await w.tokens(prompt) == expected[length]
        await w.idle()


QUANTISED = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int8", "fp8")]


@pytest.mark.parametrize("kv_dtype", ["auto", *QUANTISED])
async def test_preemption_changes_no_token(model_path: Path, kv_dtype: str) -> None:
    async with world(model_path, kv_dtype=kv_dtype, num_blocks=10, max_num_batched_tokens=12) as w:
        await until_counted(w, "recomputed_tokens")
        assert (await w.client.status()).counters["num_preemptions"] > 0


@pytest.mark.parametrize("committed", [False, True])
async def test_a_write_after_the_release_or_the_commit_is_refused(model_path: Path, committed: bool) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 4)
        if committed:
            landing = await w.client.hand_off(prompt)
            await w.tokens(prompt)
        else:
            landing = await w.client.reserve(prompt)
            await w.client.release(prompt)
            await w.idle()
            await refused(w.client.commit(prompt, landing), StaleLease)
        await refused(w.client.write(prompt, landing), StaleLease)
        await w.idle()


async def test_requests_for_other_workers_are_refused(model_path: Path) -> None:
    """Refused are a reservation for other weights, whose error names both; a submission; and a cancelled request."""
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(5), 4)
        message = await refused(w.client.reserve(prompt, fingerprint="other"), Incompatible)
        assert "prefill=other" in message
        assert f"decode={w.client.engine.fingerprint}" in message
        submission = worker_pb2.SubmitRequest()
        submit = w.client.channels.call(w.client.worker.Submit, submission, timeout_s=PATIENCE_S)
        await refused(submit, InvalidRequest)
        await w.client.cancel(prompt)
        await refused(w.client.reserve(prompt), Cancelled)


async def test_a_full_pool_makes_reservations_wait_and_then_refuses_them(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation waits for the call's timeout less a margin. A cancelled one leaves the queue."""
    async with world(model_path, num_blocks=4) as w:
        first = w.client.compute(prompt_of(24), 4)
        await w.client.reserve(first)
        status = await w.client.status()
        load = status.load
        assert (load.leased_blocks, load.free_blocks, load.held_blocks) == (3, 1, 0)
        assert status.num_blocks == 4
        with monkeypatch.context() as margin:
            margin.setattr("moonserve.decode_worker.service.ANSWER_MARGIN_S", MAX_RESERVE_WAIT_S)
            await refused(w.client.reserve(w.client.compute(prompt_of(16, 1), 4)), Overloaded)
        gone = asyncio.create_task(w.client.reserve(w.client.compute(prompt_of(16, 2), 4)))
        await until_queued(w, 1)
        gone.cancel()
        await asyncio.wait({gone})
        await until_queued(w, 0)
        waiting = asyncio.create_task(w.client.reserve(w.client.compute(prompt_of(16, 3), 4)))
        await until_queued(w, 1)
        await w.client.release(first)
        assert len((await asyncio.wait_for(waiting, PATIENCE_S)).block_ids) == 2


async def test_a_cancelled_request_ends_and_frees_everything(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = hold_steps(monkeypatch)
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 400)
        await w.client.hand_off(prompt)
        steps.release()
        await w.ears.until(lambda: prompt.name in w.ears.tokens)
        await w.client.cancel(prompt)
        steps.release()
        await w.idle()
        assert prompt.name not in w.ears.finished


async def test_engine_error_fails_the_request_and_not_the_worker(model_path: Path) -> None:
    async with world(model_path) as w:
        prompt = replace(w.client.compute(prompt_of(20), 4), first_token_id=10**6)
        await w.client.hand_off(prompt)
        await w.ears.failure(prompt.name)
        assert len(await w.complete(w.client.compute(prompt_of(9), 4))) == 4
        await w.idle()


def test_landing_ranges_join_neighbouring_blocks() -> None:
    layout = KvLayout(num_layers=1, block_size=2, num_kv_heads=1, head_dim=1, dtype="float32")
    assert landing_ranges([5, 1, 2], layout, 10) == [(8, 16), (40, 8), (88, 16), (120, 8)]
