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

from tests.e2e.cluster import (
    GREEDY,
    Cluster,
    cached_of,
    prompt_of,
    running_cluster,
    tokens_of,
)
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


def wishes(
    count: int, *, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0
) -> list[dict[str, Any]]:
    """Greedy requests of lengths between these bounds."""
    dice = random.Random(seed)
    return [
        {
            "prompt": dice.choices(range(256), k=dice.randint(*prompt)),
            "max_tokens": dice.randint(*output),
            **GREEDY,
        }
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


def streamed(
    cluster: Cluster, asked: Sequence[dict[str, Any]], num_clients: int
) -> list[list[int]]:
    """The tokens of each, as many at once as there are clients."""
    limits = httpx.Limits(max_connections=num_clients)
    with (
        httpx.Client(
            base_url=cluster.url, timeout=3 * PATIENCE_S, limits=limits, verify=False
        ) as client,
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


def test_a_pool_too_small_for_all_lets_them_take_turns(
    cluster: Cluster, tmp_path: Path, model: Path
) -> None:
    """Greedy or by a seed, they say what they say alone in a cluster with room for all, which cuts prompts otherwise.
    Draws are among few tokens: among thousands one would fall within the last bits of where the next one begins."""
    flags = (
        *("--kv-cache-memory", str(NUM_CRAMPED * BLOCK_BYTES), "--store-nodes", "0"),
        *("--max-num-batched-tokens", "50", "--max-num-seqs", "32"),
        *("--block-allocation", "on-demand"),  # which lets more in than can stay
    )
    asked = wishes(12, prompt=(30, 100), output=(280, 320), seed=1)
    drawn = {"temperature": 1.0, "top_k": 5}
    asked[::2] = [{**wish, **drawn, "seed": seed} for seed, wish in enumerate(asked[::2])]
    expected = [alone(cluster, wish) for wish in asked]
    with running_cluster(model, tmp_path, *COMMON, *flags) as cramped:
        assert cramped.status("decode-0").num_blocks == NUM_CRAMPED
        for _ in range(20):  # whether they meet in the pool is up to the machine
            assert streamed(cramped, asked, len(asked)) == expected
            if preempted := cramped.counter("decode-0", "num_preemptions"):
                break
        assert preempted
        cramped.wait_for(
            "the metric", lambda: cramped.metric("vllm:num_preemptions_total") == preempted
        )
        cramped.wait_until_all_is_free()
        leave_while_the_pool_is_full(cramped)
        assert not cramped.tracebacks(), cramped.logs()


def leave_while_the_pool_is_full(cluster: Cluster) -> None:
    """The second of two does not fit beside a landing and gives its place in the line up; then the first leaves.

    The landing is this test's own, so that the pool is full for as long as it wants, however fast the first ends.
    """
    prompt = prompt_of("full", 600)  # 38 blocks of 48
    with cluster.landing("decode-0", 11, BLOCK_SIZE) as landing, RawClient(cluster) as first:
        first.ask(prompt[:200], max_tokens=360)  # 35 blocks at its end
        response = first.reply()
        read_events(response, 2)  # the second is from the decode worker
        # The decode worker's token may be here before the prefill worker has heard that its commit was taken.
        cluster.wait_for("its handoff", lambda: not cluster.status("prefill-0").load.held_blocks)
        handed_off = cluster.counter("prefill-0", "handed_off_requests")

        def waits() -> bool:
            landing.renew()
            return cluster.status("decode-0").load.num_waiting == 1

        with RawClient(cluster) as second:
            second.ask(prompt[::-1], max_tokens=5)
            cluster.wait_for("a line", waits)
        cluster.wait_for("its end", lambda: not cluster.status("prefill-0").load.held_blocks)
        cluster.wait_for("no line", lambda: not cluster.status("decode-0").load.num_waiting)
        assert cluster.counter("prefill-0", "handed_off_requests") == handed_off
        read_events(response, 1)
    cluster.wait_until_all_is_free()


def test_what_cannot_meet_its_slo_is_refused_with_when_to_come_back(
    tmp_path: Path, model: Path
) -> None:
    flags = ("--dtype", "float32", "--ttft-slo", "0.000001", "--store-nodes", "0")
    with running_cluster(model, tmp_path, *flags) as cluster, cluster.client() as client:
        for stream in (False, True):
            wish = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": stream}
            response = client.post("/v1/completions", json=wish)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
            assert error["predicted_ttft_s"] > 0.000001
            assert error["predicted_tbt_s"] > 0
        # A client's own limit goes before the cluster's.
        patient = client.post("/v1/completions", json=wish, headers={"x-slo-ttft-ms": "60000"})
        assert patient.status_code == 200
