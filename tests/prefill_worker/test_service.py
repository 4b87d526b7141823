"""Prefill worker's service with real sockets, real memory, a tiny model, a decode worker and a store."""

import asyncio
import dataclasses
import math
from pathlib import Path

import pytest

from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.pb import worker_pb2_grpc
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.wire import submission_to_wire
from tests.decode_worker.world import prompt_of
from tests.engine.steps import random_prompt
from tests.kvstore.node.nodes import until_stats
from tests.patience import PATIENCE_S, answered, came_true
from tests.prefill_worker.builders import make_placement
from tests.prefill_worker.cluster import NUM_STORED, PROMPT, Cluster, Gate, cluster, put_into, source_of, store_node
from tests.worker.parts import BLOCK_SIZE, layout_of


def gone(c: Cluster) -> Endpoint:
    """Returns the endpoint of an unreachable process."""
    return dataclasses.replace(c.decode, instance_id="store-0", rpc_address="127.0.0.1:1")


async def at(gate: Gate) -> None:
    await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    ("kv_dtype", "device"),
    [
        ("auto", "cpu"),
        pytest.param("int8", "cpu", marks=pytest.mark.slow),
        pytest.param("fp8", "cpu", marks=pytest.mark.slow),
        ("auto", "cpu-staged"),
        pytest.param("fp8", "cpu-staged", marks=pytest.mark.slow),
    ],
)
async def test_tokens_are_those_of_the_coupled_engine(model_path: Path, kv_dtype: str, device: str) -> None:
    """Holds for concurrent prompts with lengths around block and chunk boundaries. A prefix that two prompts share is
    computed once and sent once."""
    async with cluster(model_path, kv_dtype=kv_dtype, device=device) as c:
        lengths = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 20, 29, 41, 64)
        for length in lengths:
            await c.submit(f"r{length}", prompt_of(length, length), max_tokens=20)
        for length in lengths:
            expected = c.expected(prompt_of(length, length), 20)
            assert await c.ears.all_tokens(f"r{length}") == expected
        await c.assert_drained()
        assert (await c.status()).counters["handed_off_requests"] == len(lengths)
        shared = prompt_of(4 * BLOCK_SIZE, 99)
        for name, prompt, num_computed in (("first", [*shared, 1, 2], 34), ("second", [*shared, 3, 4, 5], 3)):
            c.engine.num_tokens = 0
            await c.submit(name, prompt, max_tokens=4)
            assert await c.ears.all_tokens(name) == c.expected(prompt, 4)
            assert c.engine.num_tokens == num_computed
        assert c.ears.reports["second"].cached_tokens == 4 * BLOCK_SIZE
        assert c.decoder.state.counters.shared_blocks == 4
        await c.assert_drained()


@pytest.mark.parametrize("num_steps", [0, 2, 3])
async def test_a_prompt_is_computed_while_its_landing_is_requested(model_path: Path, num_steps: int) -> None:
    """The landing is granted in the first step, in the last, and after it. All KV is sent, once."""
    async with cluster(model_path) as c:
        for gate in (c.landings.reserving, c.engine.gate, c.landings.gate):
            gate.close()
        await c.submit("r", prompt_of(45), max_tokens=6)
        for _ in range(num_steps):
            await at(c.engine.gate)
            c.engine.gate.reached.clear()
            c.engine.gate.open()  # for the step that waits
            c.engine.gate.close()
        await (came_true(lambda: not c.service.state.queued_tokens) if num_steps == 3 else at(c.engine.gate))
        c.landings.reserving.open()
        await came_true(c.service.state.leases_to_renew)
        c.engine.gate.open()
        c.landings.gate.open()
        assert await c.ears.all_tokens("r") == c.expected(prompt_of(45), 6)
        assert not (await c.status()).counters["integrity_failures"]
        await c.assert_drained()


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_corrupt_transfer_is_detected_recomputed_and_counted(
    model_path: Path, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_thread:
        monkeypatch.setattr("moonserve.decode_worker.block_verifier.INLINE_BYTES", 0)
    async with cluster(model_path) as c:
        c.faults.corrupt_writes = 1
        await c.submit("r", prompt_of(45), max_tokens=6)
        assert await c.ears.all_tokens("r") == c.expected(prompt_of(45), 6)
        counters = (await c.status()).counters
        assert counters["integrity_failures"] == c.decoder.state.counters.integrity_failures == 1
        assert counters["recomputed_blocks"] >= 1
        await c.assert_drained()


async def test_a_block_that_arrives_corrupt_at_the_store_is_computed_and_put_again(model_path: Path) -> None:
    """Its bytes in the worker's memory are suspect too, so that they are not put a second time."""
    async with cluster(model_path, home_store="store-0") as c, store_node(c) as store:
        c.service.home_found(store)
        c.faults.corrupt_writes = 1
        await c.submit("r", PROMPT, max_tokens=1)
        await c.ears.all_tokens("r")
        await answered(c.status, lambda status: status.counters["integrity_failures"])
        assert c.engine.num_tokens == len(PROMPT)
        await put_into(c, store, [PROMPT])
        assert c.engine.num_tokens > len(PROMPT) + 1
        assert (await c.status()).counters["integrity_failures"] == 1
        await c.assert_drained()


async def test_corrupt_cached_block_keeps_its_writers_checksum(model_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("corrupt", "dropped", "timeout_s", "reachable", "code"),
    [
        pytest.param(10_000, 0, 600.0, True, "integrity", id="a path that always corrupts"),
        pytest.param(0, 1, 600.0, True, "peer_lost", id="a lost connection"),
        pytest.param(0, 0, 0.1, True, "deadline", id="no time"),
        pytest.param(0, 0, 600.0, False, "peer_lost", id="nobody there"),
    ],
)
async def test_failed_handoff_fails_the_request_and_frees_its_blocks(
    model_path: Path, corrupt: int, dropped: int, timeout_s: float, reachable: bool, code: str
) -> None:
    async with cluster(model_path) as c:
        c.faults.corrupt_writes, c.faults.drop_connections = corrupt, dropped
        if code == "deadline":
            c.engine.gate.close()
        decode = c.decode if reachable else gone(c)
        await c.submit("r", prompt_of(20), timeout_s=timeout_s, decode=decode)
        assert (await c.ears.failure("r")).code == code
        c.engine.gate.open()
        await c.assert_drained()


async def test_a_lease_is_renewed_again_and_again_while_a_request_waits(model_path: Path) -> None:
    """The interval is that of a lease of 0.03 s, so that the test is short."""
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


async def test_malformed_submissions_are_refused_before_they_become_requests(model_path: Path) -> None:
    async with cluster(model_path) as c:
        stub = worker_pb2_grpc.WorkerStub(c.channels.to(c.prefill.rpc_address))
        request = c.request("r", prompt_of(20))
        message = submission_to_wire(request, make_placement(request))
        for name, value in (
            ("token_ids", b"abc"),
            ("token_ids", (999).to_bytes(4, "little") * 20),
            ("num_prompt_tokens", 21),
            ("block_keys", b""),
        ):
            wrong = type(message)()
            wrong.CopyFrom(message)
            setattr(wrong, name, value)
            with pytest.raises(InvalidRequest):
                await c.channels.call(stub.Submit, wrong, timeout_s=PATIENCE_S)
        for rank in (math.nan, math.inf, -math.inf):
            message.placement.rank = rank
            with pytest.raises(InvalidRequest, match="rank"):
                await c.channels.call(stub.Submit, message, timeout_s=PATIENCE_S)
        await c.assert_drained()


@pytest.mark.parametrize("phase", ["queued", "reserving", "loading", "running", "committing"])
async def test_a_request_is_cancelled_wherever_it_is_held(model_path: Path, phase: str) -> None:
    """Holds while it waits for blocks, for a landing at a full decode worker, for a store, a step or a commit."""
    full = {"queued": {"num_blocks": 4}, "reserving": {"decode_blocks": 4}}.get(phase, {})
    async with cluster(model_path, **full) as c:
        gates = {"loading": c.stores.gate, "committing": c.landings.gate}
        gate = gates.get(phase, c.engine.gate)
        gate.close()
        if full:
            await c.submit("big", prompt_of(30), max_tokens=2)
            await at(gate)
        sources = [source_of(gone(c))] if phase == "loading" else []
        # One token needs no landing, so that the load is the only operation in flight.
        max_tokens = 1 if phase == "loading" else 8
        length = 20 if full else 60
        await c.submit("r", prompt_of(length), sources=sources, max_tokens=max_tokens)
        await at(gate)
        await c.cancel("r")
        if phase != "committing":  # the decode worker may have taken it over
            assert (await c.ears.failure("r")).code == "cancelled"
        assert (await c.status()).counters[f"cancelled_{phase}"] == 1
        gate.open()
        if full:
            await c.ears.all_tokens("big")
        await c.assert_drained()
        if phase == "running":
            assert c.engine.num_tokens == 20, "the step under way, and no other"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_prefix_that_is_only_on_disk_is_read_or_fetched_ahead(
    model_path: Path, tmp_path: Path, waits: bool
) -> None:
    """The prefix is on the disk of a restarted store. For a request that waits for an earlier one, it is prefetched."""
    async with cluster(model_path, home_store="store-0") as writer:
        disk = f"{tmp_path}:64MiB"
        async with store_node(writer, disk) as store:
            await put_into(writer, store, [PROMPT])
        async with store_node(writer, disk) as store, cluster(model_path, num_blocks=8 if waits else 48) as reader:

            async def until_on_disk_only(count: int) -> None:
                await until_stats(reader.stores, store, lambda s: s.recovered == 1 and s.num_on_disk == count)

            await until_on_disk_only(NUM_STORED)
            if waits:
                reader.engine.gate.close()
                await reader.submit("big", [(7 * i) % 250 for i in range(40)], max_tokens=1)
                await at(reader.engine.gate)
            await reader.submit("r", PROMPT, sources=[source_of(store)], max_tokens=5)
            if waits:
                await until_on_disk_only(0)
                reader.engine.gate.open()
            assert await reader.ears.all_tokens("r") == reader.expected(PROMPT, 5)
            counters = (await reader.status()).counters
            assert counters["store_hit_blocks"] == NUM_STORED
            assert counters["prefetched_blocks"] == (NUM_STORED if waits else 0)
            read = reader.service.state.prefix_loads.read_stats()[store.instance_id]
            assert read.num_bytes == NUM_STORED * layout_of(model_path).block_bytes
            assert read.seconds > 0
            await reader.assert_drained()


MODEL = {"num_key_value_heads": 4}  # for up to four ranks
MAX_TOKENS = 8
SHARED = random_prompt(5 * BLOCK_SIZE, seed=1)
PROMPTS = {
    "first": SHARED + random_prompt(7, seed=2),
    "its-prefix-is-cached": SHARED + random_prompt(30, seed=3),
    "short": random_prompt(3, seed=4),
}


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2)])
async def test_any_sizes_give_the_tokens_of_one_engine(prefill_ranks: int, decode_ranks: int, own_model: Path) -> None:
    """Prefill and decode workers of any tensor-parallel sizes have equal layouts and fingerprints."""
    sizes = {"prefill_ranks": prefill_ranks, "decode_ranks": decode_ranks}
    async with cluster(own_model, **sizes) as c:  # type: ignore[arg-type]
        for name, prompt in PROMPTS.items():
            await c.submit(name, prompt, max_tokens=MAX_TOKENS)
            assert await c.ears.all_tokens(name) == c.expected(prompt, MAX_TOKENS)
        assert c.engine.num_tokens == sum(map(len, PROMPTS.values())) - len(SHARED)
        await c.assert_drained()


@pytest.mark.parametrize(("writing", "reading"), [(2, 1), (1, 2), (4, 2)])
async def test_a_store_does_not_know_how_many_ranks_made_a_block(writing: int, reading: int, own_model: Path) -> None:
    """Blocks put by a worker of one size serve a worker of another size."""
    async with (
        cluster(own_model, home_store="store-0", prefill_ranks=writing) as writer,
        store_node(writer) as store,
        cluster(own_model, layered_loads="never", prefill_ranks=reading) as reader,
    ):
        await put_into(writer, store, [PROMPTS["first"]])
        prompt = PROMPTS["its-prefix-is-cached"]
        await reader.submit("r", prompt, sources=[source_of(store, 5)], max_tokens=MAX_TOKENS)
        assert await reader.ears.all_tokens("r") == reader.expected(prompt, MAX_TOKENS)
        assert (await reader.status()).counters["store_hit_blocks"] == 5
        await reader.assert_drained()
