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

from tests.e2e.accounts import Accounts, accounts_of
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.raw_http import RawClient, read_events
from tests.e2e.sse import stream_tokens
from tests.patience import PATIENCE_S
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 2_048
BLOCK_SIZE = 16
BLOCK_BYTES = 8_192
"""Of the model below: 16 tokens, K and V of 2 layers, 2 heads of 16 float32."""

COMMON = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--ttft-slo", "10000")
MAX_GROWTH_KIB = 16 * 1024
"""Of a process in 500 requests: what the conductor's memory of them and the allocator's slack may take."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "model"
    make_model("llama", folder, max_position_embeddings=MAX_MODEL_LEN)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    """One with room for everything."""
    flags = (*COMMON, "--kv-cache-memory", "64MiB")
    with pytest.MonkeyPatch.context() as patch:
        # oneDNN and torch keep a kernel for each of the last 1,024 shapes of a product, some hundred megabytes, before
        # the first is dropped: too much to see a leak behind.
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
        patch.setenv("LRU_CACHE_CAPACITY", "8")
        with running_cluster(model, tmp_path_factory.mktemp("logs"), *flags) as cluster:
            yield cluster
            assert not cluster.tracebacks(), cluster.logs()


@dataclass(frozen=True)
class Wish:
    """A greedy request of its own length."""

    prompt: list[int]
    max_tokens: int

    def body(self, **parameters: Any) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, **fixed, **parameters}


def wishes(
    count: int, *, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0
) -> list[Wish]:
    """Of lengths between these bounds."""
    dice = random.Random(seed)
    return [
        Wish(dice.choices(range(256), k=dice.randint(*prompt)), dice.randint(*output))
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


def streamed(cluster: Cluster, asked: Sequence[Wish], num_clients: int) -> list[list[int]]:
    """The tokens of each, as many at once as there are clients."""
    limits = httpx.Limits(max_connections=num_clients)
    with (
        httpx.Client(
            base_url=cluster.url, timeout=3 * PATIENCE_S, limits=limits, verify=False
        ) as client,
        ThreadPoolExecutor(num_clients) as pool,
    ):
        return list(pool.map(lambda wish: stream_tokens(client, wish.body()), asked))


def alone(cluster: Cluster, wish: Wish) -> list[int]:
    """The tokens when nothing else runs and nothing of it is cached."""
    answer = cluster.complete(**wish.body(cache_salt="alone"))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_64_streams_at_once_are_as_if_each_were_alone(cluster: Cluster) -> None:
    asked = wishes(64, prompt=(1, 600), output=(1, 80))
    with accounts_of(cluster) as accounts:
        together = streamed(cluster, asked, 64)
        assert [len(found) for found in together] == [wish.max_tokens for wish in asked]
        accounts.wait_until_all_is_free()
        for index in range(0, 64, 4):
            assert together[index] == alone(cluster, asked[index])
        accounts.wait_until_all_is_free()


@pytest.mark.slow
def test_500_requests_leave_no_descriptor_thread_or_memory_behind(cluster: Cluster) -> None:
    with accounts_of(cluster) as accounts:
        work(cluster, accounts, 100)
        before = footprints(cluster)
        work(cluster, accounts, 500)
        deadline = time.monotonic() + PATIENCE_S  # for connections that are being closed
        while grown := more_than(before, footprints(cluster)):
            assert time.monotonic() < deadline, grown
            time.sleep(0.1)


def work(cluster: Cluster, accounts: Accounts, count: int) -> None:
    """So many short requests, every tenth of which is given up by its client; then quiet."""
    asked = wishes(count, prompt=(1, 100), output=(1, 12), seed=count)
    leaving, staying = asked[::10], [wish for i, wish in enumerate(asked) if i % 10]
    with ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(lambda: [give_up(cluster, wish) for wish in leaving])
        found = streamed(cluster, staying, 16)
        given_up.result()
    assert [len(tokens) for tokens in found] == [wish.max_tokens for wish in staying]
    accounts.wait_until_all_is_free()


def give_up(cluster: Cluster, wish: Wish) -> None:
    with RawClient(cluster) as client:
        client.ask(wish.prompt, max_tokens=1_000)
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


def test_a_pool_too_small_for_all_lets_them_take_turns(tmp_path: Path, model: Path) -> None:
    num_blocks = 48
    flags = (*COMMON, "--kv-cache-memory", str(num_blocks * BLOCK_BYTES), "--store-nodes", "0")
    flags += ("--block-allocation", "on-demand")  # which lets more in than can stay
    # Each ends with 20 to 27 of the 48 blocks: three that meet cannot stay, and many of two cannot.
    asked = wishes(12, prompt=(30, 100), output=(280, 320))
    with running_cluster(model, tmp_path, *flags) as cluster, accounts_of(cluster) as accounts:
        assert accounts.worker("decode-0").num_blocks == num_blocks
        together = streamed_until_preempted(cluster, accounts, asked)
        accounts.wait_until_all_is_free()
        assert together == [alone(cluster, wish) for wish in asked]
        leave_while_the_pool_is_full(cluster, accounts)
        assert not cluster.tracebacks(), cluster.logs()


def streamed_until_preempted(
    cluster: Cluster, accounts: Accounts, asked: Sequence[Wish]
) -> list[list[int]]:
    """The tokens of each, of a time when one had to give way: whether they meet in the pool is up to the machine."""
    for _ in range(20):
        found = streamed(cluster, asked, len(asked))
        if accounts.counter("decode-0", "num_preemptions"):
            return found
    raise AssertionError("nothing was preempted")


def leave_while_the_pool_is_full(cluster: Cluster, accounts: Accounts) -> None:
    """The second of two does not fit beside a landing and gives its place in the line up; then the first leaves.

    The landing is this test's own, so that the pool is full for as long as it wants, however fast the first ends.
    """
    prompt = random.Random(2).choices(range(256), k=600)  # 38 blocks of 48
    with accounts.landing("decode-0", 11, BLOCK_SIZE) as landing, RawClient(cluster) as first:
        first.ask(prompt[:200], max_tokens=360)  # 35 blocks at its end
        response = first.reply()
        read_events(response, 2)  # the second is from the decode worker
        # The decode worker's token may be here before the prefill worker has heard that its commit was taken.
        cluster.wait_for("its handoff", lambda: not accounts.worker("prefill-0").load.held_blocks)
        handed_off = accounts.counter("prefill-0", "handed_off_requests")

        def waits() -> bool:
            landing.renew()
            return accounts.worker("decode-0").load.num_waiting == 1

        with RawClient(cluster) as second:
            second.ask(prompt[::-1], max_tokens=5)
            cluster.wait_for("a line", waits)
        cluster.wait_for("its end", lambda: not accounts.worker("prefill-0").load.held_blocks)
        cluster.wait_for("no line", lambda: not accounts.worker("decode-0").load.num_waiting)
        assert accounts.counter("prefill-0", "handed_off_requests") == handed_off
        read_events(response, 1)
    accounts.wait_until_all_is_free()


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
