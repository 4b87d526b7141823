"""The prefill worker with real sockets, real memory, a real (tiny) model and a real decode worker."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from kvstore.node import serve as serve_store
from protocol.errors import InvalidRequest
from protocol.pb import worker_pb2_grpc
from protocol.request import Endpoint, PrefixSource
from protocol.wire import submission_to_wire
from tests.patience import PATIENCE_S
from tests.prefill_worker.builders import make_placement
from tests.prefill_worker.cluster import (
    BLOCK_SIZE,
    TOKEN,
    Cluster,
    cluster,
)
from tests.prefill_worker.gates import Gate
from tests.random_models import make_model
from tests.services import serving


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


@asynccontextmanager
async def store_node(c: Cluster) -> AsyncIterator[Endpoint]:
    """The product's store node."""
    config = StoreConfig(instance_id="store-0", cluster_token=TOKEN, dram=4 * 2**20)
    async with serving(serve_store, config) as facts:
        yield await c.stores.locate(facts["rpc"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + 11 * i * i + 5 * i) % 250 for i in range(length)]


async def at(gate: Gate) -> None:
    await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)


async def test_tokens_are_those_of_the_coupled_engine(model_path: Path) -> None:
    """Prompts around block and chunk borders, several at once."""
    async with cluster(model_path) as c:
        lengths = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 20, 41, 64)
        for length in lengths:
            await c.submit(f"r{length}", prompt_of(length, length), max_tokens=6)
        for length in lengths:
            expected = c.expected(prompt_of(length, length), 6)
            assert await c.ears.all_tokens(f"r{length}") == expected
        await c.assert_drained()
        assert (await c.status()).counters["handed_off_requests"] == len(lengths)


async def test_a_shared_prefix_is_computed_once_and_sent_once(model_path: Path) -> None:
    async with cluster(model_path) as c:
        shared = prompt_of(4 * BLOCK_SIZE)
        await c.submit("first", [*shared, 1, 2], max_tokens=4)
        assert await c.ears.all_tokens("first") == c.expected([*shared, 1, 2], 4)
        c.engine.num_tokens = 0
        await c.submit("second", [*shared, 3, 4, 5], max_tokens=4)
        assert await c.ears.all_tokens("second") == c.expected([*shared, 3, 4, 5], 4)
        assert c.engine.num_tokens == 3
        assert c.ears.reports["second"].cached_tokens == 4 * BLOCK_SIZE
        assert c.decoder.state.counters.as_dict()["shared_blocks"] == 4
        await c.assert_drained()


async def test_a_request_for_one_token_ends_here(model_path: Path) -> None:
    async with cluster(model_path) as c:
        gone = dataclasses.replace(c.decode, rpc_address="127.0.0.1:1")
        await c.submit("r", prompt_of(30), max_tokens=1, decode=gone)
        assert await c.ears.all_tokens("r") == c.expected(prompt_of(30), 1)
        await c.assert_drained()


async def test_prefixes_go_to_the_store_and_come_back_from_it(model_path: Path) -> None:
    async with cluster(model_path, home_store="store-0") as writer, store_node(writer) as store:
        writer.service.home_found(store)
        prompt = prompt_of(5 * BLOCK_SIZE + 3)
        await writer.submit("w", prompt, max_tokens=1)
        await writer.ears.all_tokens("w")
        keys = writer.request("w", prompt).block_keys
        await writer.until_stored(store, keys)
        async with cluster(model_path) as reader:
            source = PrefixSource(store=store, first_block=0, num_blocks=5)
            await reader.submit("r", prompt, sources=[source], max_tokens=5)
            assert await reader.ears.all_tokens("r") == reader.expected(prompt, 5)
            assert reader.engine.num_tokens == 3
            assert (await reader.status()).counters["store_hit_blocks"] == 5
            await reader.assert_drained()
        await writer.assert_drained()


async def test_a_store_that_is_gone_means_computing(model_path: Path) -> None:
    async with cluster(model_path) as c:
        gone = dataclasses.replace(c.decode, instance_id="store-0", rpc_address="127.0.0.1:1")
        source = PrefixSource(store=gone, first_block=0, num_blocks=3)
        await c.submit("r", prompt_of(30), sources=[source], max_tokens=4)
        assert await c.ears.all_tokens("r") == c.expected(prompt_of(30), 4)
        assert (await c.status()).counters["prefix_load_failures"] == 1
        await c.assert_drained()


async def test_a_corrupt_transfer_is_detected_recomputed_and_counted(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.faults.corrupt_writes = 1
        await c.submit("r", prompt_of(45), max_tokens=6)
        assert await c.ears.all_tokens("r") == c.expected(prompt_of(45), 6)
        counters = (await c.status()).counters
        assert counters["integrity_failures"] >= 1
        assert counters["recomputed_blocks"] >= 1
        await c.assert_drained()


async def test_a_path_that_always_corrupts_fails_the_request_for_another_placement(
    model_path: Path,
) -> None:
    async with cluster(model_path) as c:
        c.faults.corrupt_writes = 10_000
        await c.submit("r", prompt_of(45), max_tokens=6)
        assert (await c.ears.failure("r")).code == "integrity"
        await c.assert_drained()


async def test_a_block_that_went_bad_in_the_device_cache_is_not_blessed(model_path: Path) -> None:
    """The writer's checksum, not one made anew, goes with a cached block."""
    async with cluster(model_path) as c:
        prompt = prompt_of(3 * BLOCK_SIZE + 2)
        await c.submit("first", prompt, max_tokens=1)
        await c.ears.all_tokens("first")
        c.engine.thread.engine.memory[5] ^= 0xFF  # in block 0, where the first prompt began
        await c.submit("second", [*prompt, 7], max_tokens=4)
        await c.ears.until(lambda: "second" in c.ears.finished or "second" in c.ears.failures)
        counters = (await c.status()).counters
        assert counters["integrity_failures"] >= 1
        assert counters["recomputed_blocks"] >= 3
        await c.submit("third", [*prompt, 7], max_tokens=4)
        assert await c.ears.all_tokens("third") == c.expected([*prompt, 7], 4)
        await c.assert_drained()


async def test_a_decode_worker_that_cannot_be_reached_fails_the_request(model_path: Path) -> None:
    async with cluster(model_path) as c:
        gone = dataclasses.replace(c.decode, rpc_address="127.0.0.1:1")
        await c.submit("r", prompt_of(20), decode=gone)
        assert (await c.ears.failure("r")).code == "peer_lost"
        await c.assert_drained()


async def test_a_decode_worker_with_other_weights_fails_the_request_for_another_placement(
    model_path: Path, tmp_path: Path
) -> None:
    make_model("llama", tmp_path, seed=1)
    async with cluster(model_path) as c, cluster(tmp_path) as other:
        await c.submit("r", prompt_of(20), decode=other.decode)
        assert (await c.ears.failure("r")).code == "peer"
        await c.assert_drained()
        await other.assert_drained()


async def test_a_lost_connection_fails_the_request_and_frees_its_blocks(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.faults.drop_connections = 1
        await c.submit("r", prompt_of(20))
        assert (await c.ears.failure("r")).code == "peer_lost"
        await c.assert_drained()


async def test_a_lease_is_renewed_again_and_again_while_a_request_waits(model_path: Path) -> None:
    """As often as leases much shorter than this one would need."""
    async with cluster(model_path, renewed_as_of_s=0.03) as c:
        c.engine.gate.close()
        await c.submit("r", prompt_of(20), max_tokens=4)
        await at(c.engine.gate)
        async with asyncio.timeout(PATIENCE_S):
            renewed = {await c.landings.renewed.get() for _ in range(3)}
        assert len(renewed) == 1
        c.engine.gate.open()
        assert await c.ears.all_tokens("r") == c.expected(prompt_of(20), 4)
        await c.assert_drained()


async def test_a_request_over_its_time_limit_fails(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.engine.gate.close()
        await c.submit("r", prompt_of(20), timeout_s=0.1)
        assert (await c.ears.failure("r")).code == "deadline"
        c.engine.gate.open()
        await c.assert_drained()


async def test_malformed_submissions_are_refused_before_they_become_requests(
    model_path: Path,
) -> None:
    async with cluster(model_path) as c:
        stub = worker_pb2_grpc.WorkerStub(c.channels.to(c.prefill.rpc_address))
        request = c.request("r", prompt_of(20))
        message = submission_to_wire(request, make_placement(request))
        for change in (
            {"token_ids": b"abc"},
            {"token_ids": (999).to_bytes(4, "little") * 20},
            {"num_prompt_tokens": 21},
            {"block_keys": b""},
        ):
            wrong = type(message)()
            wrong.CopyFrom(message)
            for name, value in change.items():
                setattr(wrong, name, value)
            with pytest.raises(InvalidRequest):
                await c.channels.call(stub.Submit, wrong, timeout_s=PATIENCE_S)
        for rank in (math.nan, math.inf, -math.inf):
            message.placement.rank = rank
            with pytest.raises(InvalidRequest, match="rank"):
                await c.channels.call(stub.Submit, message, timeout_s=PATIENCE_S)
        await c.assert_drained()


async def test_cancel_while_queued(model_path: Path) -> None:
    async with cluster(model_path, num_blocks=4) as c:
        c.engine.gate.close()
        await c.submit("big", prompt_of(30), max_tokens=1)
        await at(c.engine.gate)
        await c.submit("r", prompt_of(20))
        await c.cancel("r")
        assert (await c.ears.failure("r")).code == "cancelled"
        c.engine.gate.open()
        await c.ears.all_tokens("big")
        assert (await c.status()).counters["cancelled_queued"] == 1
        await c.assert_drained()


async def test_cancel_while_reserving(model_path: Path) -> None:
    """The decode worker is full: the landing is waited for."""
    async with cluster(model_path, decode_blocks=4) as c:
        c.engine.gate.close()
        await c.submit("big", prompt_of(30), max_tokens=2)
        await at(c.engine.gate)
        await c.submit("r", prompt_of(20))
        await c.cancel("r")
        assert (await c.ears.failure("r")).code == "cancelled"
        assert (await c.status()).counters["cancelled_reserving"] == 1
        c.engine.gate.open()
        await c.ears.all_tokens("big")
        await c.assert_drained()


async def test_cancel_while_loading(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.stores.gate.close()
        gone = dataclasses.replace(c.decode, instance_id="store-0", rpc_address="127.0.0.1:1")
        source = PrefixSource(store=gone, first_block=0, num_blocks=2)
        await c.submit("r", prompt_of(20), sources=[source], max_tokens=1)
        await at(c.stores.gate)
        await c.cancel("r")
        assert (await c.ears.failure("r")).code == "cancelled"
        assert (await c.status()).counters["cancelled_loading"] == 1
        c.stores.gate.open()
        await c.assert_drained()


async def test_cancel_while_running(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.engine.gate.close()
        await c.submit("r", prompt_of(60))
        await at(c.engine.gate)
        await c.cancel("r")
        assert (await c.ears.failure("r")).code == "cancelled"
        c.engine.gate.open()
        await c.assert_drained()
        assert (await c.status()).counters["cancelled_running"] == 1
        assert c.engine.num_tokens == 20  # the step under way, and no other


async def test_cancel_while_sending(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.faults.held = True
        await c.submit("r", prompt_of(16))
        await c.ears.first_token("r")
        await c.cancel("r")
        assert (await c.status()).counters["cancelled_sending"] == 1
        c.faults.held = False
        await c.assert_drained()


async def test_cancel_while_committing(model_path: Path) -> None:
    async with cluster(model_path) as c:
        c.landings.gate.close()
        await c.submit("r", prompt_of(16))
        await at(c.landings.gate)
        await c.cancel("r")
        assert (await c.status()).counters["cancelled_committing"] == 1
        c.landings.gate.open()
        await c.assert_drained()
