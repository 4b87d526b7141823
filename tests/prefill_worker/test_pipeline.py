"""Pipeline-parallel prefill group in separate processes: its tokens, its handling of faults, and its end."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonserve.prefill_worker.pipeline_stage import HiddenInbox, HiddenOutbox
from moonserve.protocol.errors import IntegrityError, PeerLost, error_classes
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import TransferEngine
from moonserve.transfer.config import TransferTimeout
from tests.engine.steps import random_prompt
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.cluster import Placed
from tests.processes import running
from tests.stopping import stop
from tests.worker.parts import BLOCK_SIZE, TOKEN, Ears, decoding, endpoint_of, listening, load_engine

MODEL = {"num_hidden_layers": 4}
CHUNK = 24
MAX_TOKENS = 6


@dataclass
class Group(Placed):
    """A `Placed` whose prefill worker consists of several processes."""

    leader: subprocess.Popen[bytes]

    def followers(self) -> list[int]:
        """Returns the process ids of the followers."""
        pid = self.leader.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def group(path: Path, *flags: str, size: int) -> AsyncIterator[Group]:
    ears = Ears()
    own = (
        *("--instance-id", "prefill-0", "--model", str(path), "--dtype", "float32", "--kernels", "torch"),
        *("--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "1MiB", "--max-num-batched-tokens", str(CHUNK)),
        *("--pipeline-parallel-size", str(size), "--cache-dir", str(path / "cache")),
    )
    async with Channels(TOKEN) as channels, decoding(path, 64) as (decode, decoder):
        with running("worker", "--role", "prefill", *own, *flags, token=TOKEN) as (leader, facts):
            endpoint = endpoint_of("prefill-0", facts["rpc"])
            async with listening(ears, channels, endpoint), listening(ears, channels, decode):
                yield Group(endpoint, decode, decoder, channels, ears, load_engine(path), leader)


PROMPTS = {"long": random_prompt(150, 1), "other": random_prompt(61, 2), "short": random_prompt(9, 3)}


async def test_a_group_gives_the_tokens_of_one_engine(own_model: Path) -> None:
    """Holds for concurrent prompts in chunks, and for a prompt with a cached prefix, of whose blocks every stage sends
    its layers without computing them."""
    async with group(own_model, size=2) as made:
        for name, prompt in PROMPTS.items():
            await made.submit(name, prompt, max_tokens=MAX_TOKENS)
        for name, prompt in PROMPTS.items():
            assert await made.ears.all_tokens(name) == made.expected(prompt, MAX_TOKENS)
        longer = [*PROMPTS["long"][:120], *random_prompt(30, 4)]
        await made.submit("longer", longer, max_tokens=MAX_TOKENS)
        assert await made.ears.all_tokens("longer") == made.expected(longer, MAX_TOKENS)
        # The decode worker's tokens may arrive before the leader has its answer to the commit.
        status = await answered(made.status, lambda status: status.counters["handed_off_requests"] == 4)
        assert status.counters["device_hit_blocks"] == 120 // BLOCK_SIZE
        assert made.decoder.state.counters.integrity_failures == 0
        followers = made.followers()
        made.leader.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(made.leader.wait, PATIENCE_S) == 0
        assert len(followers) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in followers)


async def test_corrupt_bytes_of_any_stage_are_found(own_model: Path) -> None:
    """With three stages over TCP and a corrupt first write of each, the decode worker detects the corruption and all
    stages compute those blocks again. No token is wrong."""
    flags = ("--transports", "tcp", "--fault-corrupt-writes", "1")
    async with group(own_model, *flags, size=3) as made:
        for seed, name in enumerate(("first", "second")):
            prompt = random_prompt(70, seed)
            await made.submit(name, prompt, max_tokens=MAX_TOKENS)
            assert await made.ears.all_tokens(name) == made.expected(prompt, MAX_TOKENS)
        assert made.decoder.state.counters.integrity_failures > 0
        assert (await made.status()).counters["recomputed_blocks"] > 0


@contextmanager
def stages(longest_wait_s: float = PATIENCE_S) -> Iterator[tuple[HiddenOutbox, HiddenInbox]]:
    """Yields the outbox and inbox between two stages, with two slots of up to eight rows of 16 bytes."""
    with TransferEngine(cluster_token=TOKEN) as maker, TransferEngine(cluster_token=TOKEN) as taker:
        outbox = HiddenOutbox(maker, row_bytes=16, slot_rows=8, num_slots=2)
        inbox = HiddenInbox(
            taker, outbox.source, row_bytes=16, patience=TransferTimeout(), longest_wait_s=longest_wait_s
        )
        yield outbox, inbox


def test_corrupt_hidden_states_are_refused() -> None:
    """Any change after the maker has published them is detected."""
    with stages() as (outbox, inbox):
        for step in (1, 2, 3):
            outbox.rows(step)[: 5 * 16] = bytes([step]) * (5 * 16)
            outbox.publish(step, 5)
            assert bytes(inbox.fetch(step, 5)) == bytes([step]) * 80
        outbox.rows(3)[79] ^= 1
        with pytest.raises(IntegrityError, match="corrupt"):
            inbox.fetch(3, 5)


def test_a_stage_waits_for_the_hidden_states_of_its_step() -> None:
    """Hidden states of the earlier step in the same slot are not taken for them."""
    with stages() as (outbox, inbox), ThreadPoolExecutor(1) as other:
        outbox.publish(1, 8)
        waiting = other.submit(lambda: bytes(inbox.fetch(3, 2)))
        outbox.rows(3)[:32] = b"x" * 32
        outbox.publish(3, 2)
        assert waiting.result(PATIENCE_S) == b"x" * 32


def test_a_stage_whose_predecessor_failed_does_not_wait() -> None:
    with stages() as (outbox, inbox):
        outbox.publish_failure(1)
        with pytest.raises(IntegrityError, match="no hidden states"):
            inbox.fetch(1, 5)


def test_stage_waits_for_a_bounded_time() -> None:
    with stages(longest_wait_s=0.0) as (_, inbox), pytest.raises(PeerLost):
        inbox.fetch(1, 5)


async def test_lost_stage_fails_requests_in_flight_and_ends_the_group(own_model: Path) -> None:
    """A request that waits for the stage fails with a retryable error. The leader exits, so that its supervisor can
    restart the whole group."""
    async with group(own_model, size=2) as made:
        [follower] = made.followers()
        stop(follower)
        await made.submit("r", random_prompt(100), max_tokens=MAX_TOKENS)
        await answered(made.status, lambda status: status.load.num_running)
        os.kill(follower, signal.SIGKILL)
        failure = await made.ears.failure("r")
        assert error_classes()[failure.code].retryable
        assert await asyncio.to_thread(made.leader.wait, PATIENCE_S) == 1
