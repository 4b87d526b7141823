"""Many requests, concurrent, consecutive, and while each process is replaced: all finish with the right tokens, and no
resources leak."""

import random
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from tests.e2e.cluster import GREEDY, Cluster, cached_of, prompt_of, tokens_of
from tests.e2e.load import Regulars, read_choice
from tests.patience import PATIENCE_S

CONTEXT = 2_048
FLAGS = (
    *("--dtype", "float32", "--kernels", "native", "--num-threads", "1"),
    *("--block-size", "16", "--ttft-slo", "10000", "--tbt-slo", "10000"),
    *("--kv-cache-memory", "64MiB"),  # room for everything
)
# oneDNN and torch cache a kernel for each of the last 1,024 shapes of a product, some hundred megabytes, which would
# hide a leak.
ENVIRON = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}
CLOSING_S = 5.0
MAX_GROWTH_KIB = 16 * 1024
"""Allowed growth of a process per round of requests: the conductor's memory of them and the allocator's slack."""


def wishes(count: int, *, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0) -> list[dict[str, Any]]:
    """Returns greedy requests with lengths between these bounds."""
    dice = random.Random(seed)
    return [
        {"prompt": dice.choices(range(256), k=dice.randint(*prompt)), "max_tokens": dice.randint(*output), **GREEDY}
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Footprint:
    """Resources of one process. Shared memory is excluded, because the pools' sizes limit it."""

    num_fds: int
    num_threads: int
    anonymous_kib: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        status = Path(f"/proc/{pid}/status").read_text()
        (anonymous,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), int(anonymous))


def footprints(cluster: Cluster) -> dict[str, Footprint]:
    found = {name: Footprint.of(pid) for name, pid in cluster.pids().items()}
    return {**found, "launcher": Footprint.of(cluster.process.pid)}


def streamed(cluster: Cluster, asked: Sequence[dict[str, Any]], num_clients: int) -> list[list[int]]:
    """Returns the tokens of each request, with `num_clients` requests at a time."""
    limits = httpx.Limits(max_connections=num_clients)
    with (
        httpx.Client(base_url=cluster.url, timeout=3 * PATIENCE_S, limits=limits, verify=False) as client,
        ThreadPoolExecutor(num_clients) as pool,
    ):
        found = [said.token_ids for said in pool.map(lambda w: read_choice(client, w), asked)]
    assert [len(tokens) for tokens in found] == [wish["max_tokens"] for wish in asked]
    return found


def test_64_concurrent_streams_have_the_tokens_of_single_streams(cluster: Cluster) -> None:
    asked = wishes(64, prompt=(1, 600), output=(1, 80))
    together = streamed(cluster, asked, 64)
    cluster.wait_until_all_is_free()
    alone = [cluster.complete(**wish, cache_salt="alone") for wish in asked[::4]]
    assert set(map(cached_of, alone)) == {0}
    assert together[::4] == list(map(tokens_of, alone))


def test_requests_leave_no_descriptor_thread_or_memory_behind(cluster: Cluster) -> None:
    """A leak grows in every round, whereas pools of connections and threads fill up in one round and stay."""
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
    """Returns the processes that have grown, after waiting for connections that are being closed."""
    give_up_at = time.monotonic() + CLOSING_S
    while (grown := more_than(before, footprints(cluster))) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return grown


def work(cluster: Cluster, count: int) -> None:
    """Sends `count` short requests, of which clients give up every tenth, and waits until all is free."""
    asked = wishes(count, prompt=(1, 100), output=(1, 12), seed=count)
    with ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(lambda: [give_up(cluster, wish) for wish in asked[::10]])
        streamed(cluster, [wish for i, wish in enumerate(asked) if i % 10], 16)
        given_up.result()
    cluster.wait_until_all_is_free()


def give_up(cluster: Cluster, wish: dict[str, Any]) -> None:
    body = {**wish, "max_tokens": 1_000, "stream": True}
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines())


def more_than(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    return [
        f"{name}: {before[name]} -> {now}"
        for name, now in after.items()
        if now.num_fds > before[name].num_fds + 2
        or now.num_threads > before[name].num_threads + 4
        or now.anonymous_kib > before[name].anonymous_kib + MAX_GROWTH_KIB
    ]


def test_every_process_is_replaced_under_load_and_no_request_fails(cluster: Cluster) -> None:
    """There is one process of each kind."""
    before = cluster.pids()
    epochs = {each["instance_id"]: each["epoch"] for each in cluster.instances()}
    prompts = [prompt_of(f"rolling {number}", 40) for number in range(3)]
    with Regulars(cluster, prompts, 12, num_streamed=1_500) as clients:
        cluster.process.send_signal(signal.SIGUSR1)
        ends = re.compile("every process was restarted|the rolling restart ended early")
        cluster.wait_for("the end", lambda: ends.search(cluster.output) is not None, 3 * PATIENCE_S)
    assert "every process was restarted" in cluster.output
    assert clients.begun_and_done
    after = cluster.pids()
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    cluster.wait_for("all members", lambda: all(cluster.epoch(name) > epoch for name, epoch in epochs.items()))
    cluster.wait_for("the old gateway's end", lambda: not psutil.pid_exists(before["gateway-0"]))
