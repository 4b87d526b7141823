"""A decode worker over real sockets, real memory and a real (tiny) model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from decode_worker import service as service_module
from decode_worker.service import landing_ranges
from decode_worker.servicers import MAX_WAIT_S
from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    Overloaded,
    StaleLease,
)
from protocol.layout import KvLayout
from protocol.pb import worker_pb2
from protocol.request import SamplingParams
from tests.decode_worker.held import hold_steps
from tests.decode_worker.prefill_client import (
    BLOCK_SIZE,
    Prompt,
    coupled,
)
from tests.decode_worker.world import World, world
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from transfer import FaultPlan

T = TypeVar("T")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + 11 * i * i + 5 * i) % 250 for i in range(length)]


async def refused(call: Awaitable[T], error: type[BaseException]) -> str:
    with pytest.raises(error) as caught:
        await asyncio.wait_for(call, PATIENCE_S)
    return str(caught.value)


POOLS = pytest.mark.parametrize(
    ("kv_dtype", "device"),
    [
        ("auto", "cpu"),
        ("int8", "cpu"),
        ("fp8", "cpu"),
        ("auto", "cpu-staged"),
        ("fp8", "cpu-staged"),
    ],
)


@POOLS
async def test_handed_off_requests_continue_exactly_as_the_coupled_engine(
    model_path: Path, kv_dtype: str, device: str
) -> None:
    """Prompts around block borders, several in one batch."""
    async with world(model_path, kv_dtype=kv_dtype, device=device) as w:
        prompts = [
            w.client.compute(prompt_of(length, length), 20)
            for length in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 29)
        ]
        for prompt in prompts:  # the client's blocks hold one prompt at a time
            ids = prompt.request.token_ids[:-1]
            again = w.client.compute(ids, 20)
            assert again.request.token_ids == prompt.request.token_ids
            await w.client.hand_off(prompt)
        for prompt in prompts:
            expected = coupled(w.client.engine, prompt.request.token_ids[:-1], 20)
            assert await w.received.all_of(prompt) == expected
        await w.idle()


@POOLS
async def test_a_shared_prefix_is_not_sent_and_changes_nothing(
    model_path: Path, kv_dtype: str, device: str
) -> None:
    async with world(model_path, kv_dtype=kv_dtype, device=device) as w:
        first = w.client.compute(prompt_of(30), 5)
        await w.complete(first)
        second = w.client.compute([*prompt_of(24), 1, 2, 3], 10)
        lease = await w.client.hand_off(second)
        assert lease.num_cached_blocks == 3
        expected = coupled(w.client.engine, second.request.token_ids[:-1], 10)
        assert await w.received.all_of(second) == expected
        await w.idle()


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_corrupted_write_is_found_and_repaired(
    model_path: Path, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_thread:
        monkeypatch.setattr(service_module, "VERIFY_INLINE_BYTES", 0)
    async with world(model_path, faults=FaultPlan(corrupt_writes=1)) as w:
        prompt = w.client.compute(prompt_of(20), 8)
        lease = await w.client.reserve(prompt)
        await w.client.write(prompt, lease)
        corrupt = await w.client.commit(prompt, lease)
        assert len(corrupt) == 1
        await w.client.write(prompt, lease, corrupt)
        assert await w.client.commit(prompt, lease) == []
        expected = coupled(w.client.engine, prompt.request.token_ids[:-1], 8)
        assert await w.received.all_of(prompt) == expected
        assert (await w.client.status()).counters["integrity_failures"] == 1
        await w.idle()


async def test_steps_that_run_ahead_say_the_same(model_path: Path) -> None:
    """Greedy and seeded, with penalties, to an end that is foreseen and to one that is not."""
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    seeded = SamplingParams(max_tokens=20, temperature=1.0, seed=5, presence_penalty=0.5)
    wishes = {3: greedy, 8: greedy, 12: seeded, 21: greedy}  # by the prompt's length
    async with world(model_path) as w:
        expected = {
            length: await w.complete(w.client.compute(prompt_of(length), 20, sampling=wish))
            for length, wish in wishes.items()
        }
    stop = expected[3][10]
    expected[3] = expected[3][: expected[3].index(stop) + 1]
    wishes[3] = replace(greedy, stop_token_ids=(stop,))
    prompts: dict[int, Prompt] = {}
    async with world(model_path, runs_ahead=True) as w:
        for length, wish in wishes.items():
            prompts[length] = w.client.compute(prompt_of(length), 20, sampling=wish)
            await w.client.hand_off(prompts[length])
        for length, prompt in prompts.items():
            assert await w.received.all_of(prompt) == expected[length]
        await w.idle()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
async def test_preemption_changes_no_token(model_path: Path, kv_dtype: str) -> None:
    """Three sequences that together outgrow the pool; more of them where the first had ended when the last one came."""
    few = {"num_blocks": 10, "max_num_batched_tokens": 12}
    async with world(model_path, kv_dtype=kv_dtype, **few) as w:
        for first in range(0, 60, 3):
            prompts = []
            for seed in range(first, first + 3):
                prompts.append(w.client.compute(prompt_of(14, seed), 40))
                await w.client.hand_off(prompts[-1])
            for prompt in prompts:
                expected = coupled(w.client.engine, prompt.request.token_ids[:-1], 40)
                assert await w.received.all_of(prompt) == expected
            counters = (await w.client.status()).counters
            if counters["num_preemptions"] > 0:
                break
        assert counters["num_preemptions"] > 0
        assert counters["recomputed_tokens"] > 0
        await w.idle()


async def test_a_write_after_the_release_is_refused(model_path: Path) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 8)
        lease = await w.client.reserve(prompt)
        await w.client.release(lease.lease_id)
        await w.idle()
        await refused(w.client.write(prompt, lease), StaleLease)
        await refused(w.client.commit(prompt, lease), StaleLease)


async def test_a_write_after_the_commit_is_refused(model_path: Path) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 4)
        lease = await w.client.hand_off(prompt)
        await w.received.all_of(prompt)
        await refused(w.client.write(prompt, lease), StaleLease)
        await w.idle()


async def test_other_weights_are_refused_and_both_named(model_path: Path) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(5), 4)
        message = await refused(w.client.reserve(prompt, fingerprint="other"), Incompatible)
        assert "prefill=other" in message
        assert f"decode={w.client.engine.fingerprint}" in message


async def test_a_submission_is_refused(model_path: Path) -> None:
    async with world(model_path) as w:
        call = w.client.channels.call(
            w.client.worker.Submit, worker_pb2.SubmitRequest(), timeout_s=PATIENCE_S
        )
        await refused(call, InvalidRequest)


async def test_a_full_pool_makes_reservations_wait_and_then_refuses_them(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation waits for as long as its call may take, but for a margin: a large one here."""
    monkeypatch.setattr("decode_worker.servicers.ANSWER_MARGIN_S", MAX_WAIT_S - 0.3)
    async with world(model_path, num_blocks=4) as w:
        first = w.client.compute(prompt_of(24), 4)
        await w.client.reserve(first)
        second = w.client.compute(prompt_of(16, 1), 4)
        await refused(w.client.reserve(second, timeout_s=PATIENCE_S), Overloaded)
        monkeypatch.undo()
        waiting = asyncio.create_task(w.client.reserve(w.client.compute(prompt_of(16, 2), 4)))
        await wait_until_queued(w)
        await w.client.release(first.lease_id)
        lease = await asyncio.wait_for(waiting, PATIENCE_S)
        assert len(lease.block_ids) == 2


async def wait_until_queued(w: World) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while w.service.state.num_waiting == 0:
            await w.client.status()


async def test_a_cancelled_reserve_call_gives_up_its_place(model_path: Path) -> None:
    async with world(model_path, num_blocks=4) as w:
        first = w.client.compute(prompt_of(24), 4)
        await w.client.reserve(first)
        waiting = asyncio.create_task(w.client.reserve(w.client.compute(prompt_of(16, 2), 4)))
        await wait_until_queued(w)
        waiting.cancel()
        await asyncio.wait({waiting})
        async with asyncio.timeout(PATIENCE_S):
            while (await w.client.status()).load.num_waiting:
                pass


async def test_a_cancelled_request_ends_and_frees_everything(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = hold_steps(monkeypatch)
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 400)
        await w.client.hand_off(prompt)
        name = prompt.request.request_id
        steps.release()
        await w.received.until(lambda: name in w.received.tokens)
        cancel = worker_pb2.CancelRequest(request_id=name)
        await w.client.channels.call(w.client.worker.Cancel, cancel, timeout_s=PATIENCE_S)
        steps.release()
        await w.idle()
        assert name not in w.received.finished


async def test_a_cancellation_ahead_of_the_handoff_refuses_it(model_path: Path) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 4)
        cancel = worker_pb2.CancelRequest(request_id=prompt.request.request_id)
        await w.client.channels.call(w.client.worker.Cancel, cancel, timeout_s=PATIENCE_S)
        await refused(w.client.reserve(prompt), Cancelled)


async def test_a_request_out_of_time_fails_at_its_gateway(model_path: Path) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 400, timeout_s=0.05)
        await w.client.hand_off(prompt)
        name = prompt.request.request_id
        await w.received.until(lambda: name in w.received.failures)
        assert w.received.failures[name].code == DeadlineExceeded.code
        await w.idle()


async def test_what_the_engine_raises_fails_the_request_and_not_the_worker(
    model_path: Path,
) -> None:
    async with world(model_path) as w:
        prompt = w.client.compute(prompt_of(20), 4)
        lease = await w.client.reserve(prompt)
        await w.client.write(prompt, lease)
        outside_vocabulary = (*prompt.request.token_ids[:-1], 10**6)
        prompt.request = replace(prompt.request, token_ids=outside_vocabulary)
        assert await w.client.commit(prompt, lease) == []
        name = prompt.request.request_id
        await w.received.until(lambda: name in w.received.failures)
        good = w.client.compute(prompt_of(9), 4)
        assert len(await w.complete(good)) == 4
        await w.idle()


async def test_sampled_tokens_depend_on_seed_and_position_only(model_path: Path) -> None:
    """The same request alone, and beside another one."""
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    async with world(model_path) as w:
        alone = w.client.compute(prompt_of(20), 12, sampling=sampling)
        expected = await w.complete(alone)
        neighbour = w.client.compute(prompt_of(33, 3), 40)
        await w.client.hand_off(neighbour)
        again = w.client.compute(prompt_of(20), 12, sampling=sampling)
        assert await w.complete(again) == expected
        await w.received.all_of(neighbour)
        await w.idle()


async def test_the_status_accounts_for_every_block(model_path: Path) -> None:
    async with world(model_path, num_blocks=16) as w:
        prompt = w.client.compute(prompt_of(20), 4)
        await w.client.reserve(prompt)
        status = await w.client.status()
        load = status.load
        assert (load.leased_blocks, load.free_blocks, load.held_blocks) == (3, 13, 0)
        assert status.num_blocks == 16


def test_landing_ranges_join_neighbouring_blocks() -> None:
    layout = KvLayout(num_layers=1, block_size=2, num_kv_heads=1, head_dim=1, dtype="float32")
    assert landing_ranges([5, 1, 2], layout, 10) == [(8, 16), (40, 8), (88, 16), (120, 8)]
