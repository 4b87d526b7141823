"""A worker that is killed, or a part of it, costs time and nothing else: the request goes on with the one restarted in
its place. The decode worker has two ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from protocol.request import SamplingParams
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.sse import read_completion
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 16_384
FLAGS = (
    *("--dtype", "float32", "--block-size", "32", "--kv-cache-memory", "32MiB"),
    *("--max-num-batched-tokens", "64", "--ttft-slo", "10000"),
    *("--num-threads", "2", "--decode-tensor-parallel-size", "2"),
)
STREAM: dict[str, Any] = {
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("loss")
    make_model("llama", folder / "model", max_position_embeddings=MAX_MODEL_LEN)
    with running_cluster(folder / "model", folder / "logs", *FLAGS) as cluster:
        yield cluster


def streamed(
    client: httpx.Client, prompt: list[int], on_tokens: Callable[[int], None]
) -> list[int]:
    """Token ids of a whole stream; `on_tokens` is told how many there are as they come."""
    return read_completion(client, {"prompt": prompt, **STREAM}, on_tokens)[1]


def test_a_stream_goes_on_when_its_decode_worker_is_killed(cluster: Cluster) -> None:
    prompt = random.Random("decode").choices(range(256), k=40)
    killed: list[int] = []
    [other_rank] = ranks(cluster, "decode-0")

    def on_tokens(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(cluster.kill("decode-0"))

    with cluster.client() as client:
        undisturbed = streamed(client, prompt, lambda count: None)
        assert len(undisturbed) == STREAM["max_tokens"]
        tokens = streamed(client, prompt, on_tokens)
    assert tokens == undisturbed, cluster.logs()
    cluster.wait_for("its successor", lambda: cluster.epoch("decode-0") > killed[0])
    cluster.wait_for("the end of its other rank", lambda: has_ended(other_rank))


def test_a_stream_goes_on_when_a_rank_of_its_decode_worker_is_killed(cluster: Cluster) -> None:
    """The worker ends with its rank, says so, and starts again; the tokens are those of one engine all along."""
    prompt = random.Random("rank").choices(range(256), k=40)
    killed: list[int] = []

    def on_tokens(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(cluster.epoch("decode-0"))
            for rank in ranks(cluster, "decode-0"):
                rank.kill()

    with cluster.client() as client:
        assert streamed(client, prompt, on_tokens) == one_engines(cluster, prompt), cluster.logs()
    cluster.wait_for("its successor", lambda: cluster.epoch("decode-0") > killed[0])
    log = (cluster.log_dir / "decode-0.log").read_text()
    assert "this worker ends, one of its ranks is lost" in log


def ranks(cluster: Cluster, instance_id: str) -> list[psutil.Process]:
    """A worker's ranks behind the first one."""
    return psutil.Process(cluster.pids()[instance_id]).children()


def has_ended(process: psutil.Process) -> bool:
    """Whether or not somebody has asked for its exit code."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def one_engines(cluster: Cluster, prompt: list[int]) -> list[int]:
    """What one engine of one rank says."""
    path = cluster.log_dir.parent / "model"
    config = load_model_config(path)
    layout = config.kv_layout(32, "float32")
    engine = Engine.load(path, config=config, layout=layout, num_blocks=20)
    sampling = SamplingParams(max_tokens=STREAM["max_tokens"], temperature=0.0)
    return generate(engine, [prompt], sampling)[0].token_ids


def test_a_prompt_is_read_anew_when_its_prefill_worker_is_killed(cluster: Cluster) -> None:
    """On a busy machine the kill may come when the prompt has been handed off: then another one is tried."""
    assert any(read_anew(cluster, f"prefill {attempt}") for attempt in range(5)), cluster.logs()


def read_anew(cluster: Cluster, name: str) -> bool:
    """False: the successor of the killed worker had nothing to compute, since all had been handed off."""
    prompt = random.Random(name).choices(range(256), k=16_000)
    wish: dict[str, Any] = {**STREAM, "max_tokens": 20}
    kill_now = cluster.killer("prefill-0")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.complete, prompt, **wish)
        cluster.wait_for("the prompt at work", lambda: prefilling(cluster) or asked.done())
        epoch = kill_now()
        disturbed = asked.result()
    cluster.wait_for("its successor", lambda: cluster.epoch("prefill-0") > epoch)
    was_caught = cluster.counters("prefill-0").get("computed_slices", 0) > 0
    undisturbed = cluster.complete(prompt, cache_salt="another", **wish)
    assert disturbed["choices"][0]["token_ids"] == undisturbed["choices"][0]["token_ids"]
    return was_caught


@pytest.mark.parametrize("instance_id", ["prefill-0", "decode-0"])
def test_a_new_request_gets_through_when_a_worker_has_just_been_killed(
    cluster: Cluster, instance_id: str
) -> None:
    wish: dict[str, Any] = {**STREAM, "max_tokens": 4}
    before = cluster.complete([1, 2, 3], **wish)
    cluster.kill(instance_id)
    after = cluster.complete([1, 2, 3], **wish)
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]


def prefilling(cluster: Cluster) -> bool:
    """A part of a long prompt is still to be computed."""
    return cluster.status("prefill-0").load.queued_tokens > 1_000
