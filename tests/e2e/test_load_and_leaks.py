"""Many requests at once and many after each other: all finish with the right tokens, and nothing stays behind."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tests.e2e.cluster import GREEDY, Cluster, cached_of, running_cluster, tokens_of
from tests.e2e.raw_http import RawClient, read_events
from tests.e2e.sse import read_choice
from tests.patience import PATIENCE_S
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 2_048
BLOCK_SIZE = 16
BLOCK_BYTES = 8_192
"""Of the model below: 16 tokens, K and V of 2 layers, 2 heads of 16 float32."""

COMMON = (
    *("--dtype", "float32", "--kernels", "native", "--num-threads", "1"),
    *("--block-size", str(BLOCK_SIZE), "--ttft-slo", "10000"),
)
NUM_CRAMPED = 48
"""Blocks of a pool in which requests end with 20 to 27 of them: three that meet cannot stay, and many of two cannot."""
CLOSING_S = 5.0
MAX_GROWTH_KIB = 16 * 1024
"""Of a process in a round of requests: what the conductor's memory of them and the allocator's slack may take."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "model"
    make_model("llama", folder, max_position_embeddings=MAX_MODEL_LEN)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    """One with room for everything."""
    flags = ("--kv-cache-memory", "64MiB")
    with pytest.MonkeyPatch.context() as patch:
        # oneDNN and torch keep a kernel for each of the last 1,024 shapes of a product, some hundred megabytes, before
        # the first is dropped: too much to see a leak behind.
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
        patch.setenv("LRU_CACHE_CAPACITY", "8")
        with running_cluster(model, tmp_path_factory.mktemp("logs"), *COMMON, *flags) as cluster:
            yield cluster
            assert not cluster.tracebacks(), cluster.logs()


def wishes(count: int, *, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy requests of lengths between these bounds."""
    dice = random.Random(seed)
    return [
        {"prompt": dice.choices(range(256), k=dice.randint(*prompt)), "max_tokens": dice.randint(*output), **GREEDY}
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Footprint:
    """What one process has of the machine. Shared memory has an end of its own: the pools' sizes."""

    num_fds: int
    num_threads: int
    anonymous_kib: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text()
        (anonymous,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), int(anonymous))


def footprints(cluster: Cluster) -> dict[str, Footprint]:
    found = {name: Footprint.of(pid) for name, pid in cluster.pids().items()}
    return {**found, "launcher": Footprint.of(cluster.process.pid)}


def streamed(cluster: Cluster, asked: Sequence[dict[str, Any]], num_clients: int) -> list[list[int]]:
    """The tokens of each, as many at once as there are clients."""
    limits = httpx.Limits(max_connections=num_clients)
    with (
        httpx.Client(base_url=cluster.url, timeout=3 * PATIENCE_S, limits=limits, verify=False) as client,
        ThreadPoolExecutor(num_clients) as pool,
    ):
        found = [said.token_ids for said in pool.map(lambda w: read_choice(client, w), asked)]
    assert [len(tokens) for tokens in found] == [wish["max_tokens"] for wish in asked]
    return found


def alone(cluster: Cluster, wish: dict[str, Any]) -> list[int]:
    """The tokens when nothing else runs and nothing of it is cached."""
    answer = cluster.complete(**wish, cache_salt="alone")
    assert cached_of(answer) == 0
    return tokens_of(answer)


def test_64_streams_at_once_are_as_if_each_were_alone(cluster: Cluster) -> None:
    asked = wishes(64, prompt=(1, 600), output=(1, 80))
    together = streamed(cluster, asked, 64)
    cluster.wait_until_all_is_free()
    assert together[::4] == [alone(cluster, wish) for wish in asked[::4]]
    cluster.wait_until_all_is_free()


def test_requests_leave_no_descriptor_thread_or_memory_behind(cluster: Cluster) -> None:
    """A leak grows in every round. Pools of connections and threads fill up in one of them and stay."""
    rounds: list[list[str]] = []
    work(cluster, 100)
    while len(rounds) < 4:
        before = footprints(cluster)
        work(cluster, 300)
        if not (grown := grown_for_good(cluster, before)):
            return
        rounds.append(grown)
    raise AssertionError(rounds)


def grown_for_good(cluster: Cluster, before: dict[str, Footprint]) -> list[str]:
    """Processes that have grown, connections that are being closed not counted."""
    give_up_at = time.monotonic() + CLOSING_S
    while (grown := more_than(before, footprints(cluster))) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return grown


def work(cluster: Cluster, count: int) -> None:
    """So many short requests, every tenth of which is given up by its client; then quiet."""
    asked = wishes(count, prompt=(1, 100), output=(1, 12), seed=count)
    with ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(lambda: [give_up(cluster, wish) for wish in asked[::10]])
        streamed(cluster, [wish for i, wish in enumerate(asked) if i % 10], 16)
        given_up.result()
    cluster.wait_until_all_is_free()


def give_up(cluster: Cluster, wish: dict[str, Any]) -> None:
    with RawClient(cluster) as client:
        client.ask(wish["prompt"], max_tokens=1_000)
        read_events(client.reply(), 1)


def more_than(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """Which processes have grown."""
    return [
        f"{name}: {before[name]} -> {now}"
        for name, now in after.items()
        if now.num_fds > before[name].num_fds + 2
        or now.num_threads > before[name].num_threads + 4
        or now.anonymous_kib > before[name].anonymous_kib + MAX_GROWTH_KIB
    ]
