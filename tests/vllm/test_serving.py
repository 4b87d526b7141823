"""`moonserve serve --engine vllm` with real vLLM workers: parameters, caches, order, and losses of workers.

`test_serving_parity` compares tokens with those of one instance.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import until
from tests.random_models import make_model
from tests.vllm.clusters import Cluster, collect, running_cluster
from tests.vllm.servers import START_S
from tests.vllm.stores import until_quiet

DRAWN = {"temperature": 1.0, "seed": 11, "top_p": 0.95, "presence_penalty": 0.4, "frequency_penalty": 0.2}
FLAGS = (
    *("--decode-workers", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB", "--max-model-len", "1024"),
    *("--vllm.enforce-eager", "--vllm.block-size", "32", "--vllm.max-num-seqs", "16", "--dram", "4MiB"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", folder, head_dim=32)  # the least that vLLM's kernels for CPUs take
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(model, *FLAGS, log_dir=tmp_path_factory.mktemp("logs")) as started:
        yield started


def _prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(256), k=length)


def test_a_prompt_that_comes_again_is_cached_and_the_conductor_knows_its_blocks(cluster: Cluster) -> None:
    prompt = _prompt(320, seed=1)
    cluster.until_known(prompt, cluster.tokens(prompt, 4))


def test_a_decode_worker_gets_the_prompts_kv_instead_of_computing_it(cluster: Cluster) -> None:
    cluster.wait_until_complete()
    names = ("decode-0", "decode-1")
    before = sum(cluster.counters(name)["loaded_tokens"] for name in names)
    cluster.complete(_prompt(400, seed=5), 4)
    until(lambda: sum(cluster.counters(name)["loaded_tokens"] for name in names) >= before + 400)


def test_a_short_prompt_overtakes_long_ones_that_wait(cluster: Cluster) -> None:
    """The engine is suspended until all prompts wait: how fast they come decides nothing."""
    prompts = [*(_prompt(1000, seed=100 + number) for number in range(24)), _prompt(8, seed=100)]
    order: list[int] = []

    def ask(prompt: list[int]) -> None:
        cluster.complete(prompt, 1)
        order.append(len(prompt))

    with ThreadPoolExecutor(len(prompts)) as threads, cluster.suspended_engine("prefill-0"):
        for prompt in prompts:
            threads.submit(ask, prompt)
        until(lambda: cluster.num_requests("prefill-0") == len(prompts))
    assert sorted(order) == [8, *[1000] * 24]
    assert order.index(8) < 20, "by arrival it would be the last"


def test_prompts_of_other_salts_share_no_blocks(cluster: Cluster) -> None:
    prompt = _prompt(160, seed=2)
    for salt, num_cached in (("a", 0), ("b", 0), ("a", 128)):
        usage = cluster.complete(prompt, 2, cache_salt=salt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= num_cached
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) == bool(num_cached)


def test_a_prompt_that_is_not_to_be_stored_is_in_no_cache_and_uses_what_is_there(cluster: Cluster) -> None:
    prompt = _prompt(320, seed=6)
    until_quiet(cluster.registry)
    before = cluster.stored_keys()
    for store, num_cached in ((False, 0), (True, 0), (False, 288), (True, 288)):
        usage = cluster.complete(prompt, 34, kv_cache={"store": store})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] in range(num_cached, num_cached + 33)
        until_quiet(cluster.registry)
        assert len(cluster.stored_keys() - before) == (0 if not (store or num_cached) else 11)


def test_a_prompt_that_is_expected_to_return_stays_in_the_store_while_later_ones_leave(cluster: Cluster) -> None:
    until_quiet(cluster.registry)
    expected, other = _stored(cluster, 20, return_within_s=3600), _stored(cluster, 21)
    seed = 22
    while other <= cluster.stored_keys():
        _stored(cluster, seed)
        seed += 1
    assert expected <= cluster.stored_keys()


def _stored(cluster: Cluster, seed: int, **hints: float) -> set[bytes]:
    """Sends a prompt with hints. Returns the keys of its blocks in the store."""
    before = cluster.stored_keys()
    cluster.complete(_prompt(320, seed), 2, kv_cache=hints)
    until(lambda: len(cluster.stored_keys() - before) == 10)
    return cluster.stored_keys() - before


_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def test_vllm_bench_serve_replays_a_trace_in_mooncakes_format(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """The program behind `vllm bench serve`, whose command fails in vLLM's build for CPUs."""
    lengths = [(520 + 40 * n, 4 + n) for n in range(8)]
    lines = [
        {"timestamp": 250 * n, "input_length": prompt, "output_length": answer, "hash_ids": [0, n + 1]}
        for n, (prompt, answer) in enumerate(lengths)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = (
        *("--base-url", cluster.url, "--model", str(model), "--dataset-name", "timed_trace", "--self-timed"),
        *("--dataset-path", "trace.jsonl", "--timed-trace-chunk-hash-size", "512", "--num-prompts", "8"),
        *("--timed-trace-sec-multiplier", "0.001", "--ignore-eos", "--save-result", "--result-filename", "found.json"),
    )
    subprocess.run([sys.executable, "-c", _BENCH_SERVE, *options], cwd=tmp_path, check=True, timeout=START_S)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (8, 0)
    prompts, answers = zip(*lengths, strict=True)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (sum(prompts), sum(answers))
    assert 0 < found["median_ttft_ms"] < 1000 * found["duration"]


def test_a_client_that_leaves_frees_everything(cluster: Cluster) -> None:
    with cluster.stream(_prompt(50, seed=4), 900) as events:
        for _ in range(5):
            next(events)
    cluster.wait_until_idle()


def test_a_grammar_is_followed_from_the_first_token_to_the_last(cluster: Cluster) -> None:
    for seed in range(3):
        answer = cluster.complete(
            "text", 40, temperature=1.0, seed=seed, structured_outputs={"regex": "[a-c]{9}!"}, ignore_eos=False
        )
        assert re.fullmatch("[a-c]{9}!", answer["text"])
        assert answer["finish_reason"] == "stop"


def test_bad_words_and_penalties_and_bias_see_the_whole_answer(cluster: Cluster) -> None:
    plain = cluster.tokens("text", 12)
    biased = cluster.tokens("text", 12, logit_bias={str(plain[0]): 100})
    assert biased == plain[:1] * 12
    penalized = cluster.tokens("text", 3, logit_bias={str(plain[0]): 90}, frequency_penalty=2.0, presence_penalty=2.0)
    assert penalized == plain[:1] * 3
    freed = cluster.tokens("text", 60, logit_bias={str(plain[0]): 20}, frequency_penalty=2.0)
    assert len(set(freed)) > 1, "the penalty never outweighs the bias"


def test_log_probabilities_come_with_every_token_and_the_prompt(cluster: Cluster) -> None:
    answer = cluster.complete("some text", 6, logprobs=2, prompt_logprobs=1)
    assert len(answer["logprobs"]["token_logprobs"]) == 6
    assert all(len(top) >= 2 for top in answer["logprobs"]["top_logprobs"])
    assert len(answer["prompt_logprobs"]) == len("some text")


def test_lengths_and_stops_end_an_answer_on_either_worker(cluster: Cluster) -> None:
    plain = cluster.tokens("text", 8)
    assert cluster.tokens("text", 1) == plain[:1]
    assert _stopped(cluster, plain[:1]) == plain[:1]
    assert _stopped(cluster, plain[4:5]) == plain[: plain.index(plain[4]) + 1]
    later = cluster.tokens("text", 8, stop_token_ids=plain[:1], min_tokens=3)
    assert len(later) >= 3
    assert plain[0] not in later[:3]


def _stopped(cluster: Cluster, stops: Sequence[int]) -> list[int]:
    return cluster.tokens("text", 8, stop_token_ids=list(stops))


@pytest.mark.parametrize(
    ("lost", "parameters"),
    [("prefill", DRAWN), ("decode", DRAWN), ("decode engine", DRAWN), ("decode", {})],
    ids=["prefill", "decode", "decode engine", "decode, greedy"],
)
def test_an_answer_goes_on_after_the_loss_of_a_worker(cluster: Cluster, lost: str, parameters: dict[str, Any]) -> None:
    """With its own tokens, each once. A worker and its engine end together.

    Last in this file, because the worker takes long to come back."""
    cluster.wait_until_complete()
    prompt, moment = _prompt(100, seed=3), threading.Event()
    expected = cluster.tokens(prompt, 600, **parameters)
    with cluster.stream(prompt, 600, **parameters) as events, ThreadPoolExecutor(1) as threads:
        first = next(events)
        answer = threads.submit(collect, events, moment)
        decision = cluster.decision(first["id"])
        assert moment.wait(START_S)
        role, _, part = lost.partition(" ")
        processes = cluster.kill(decision[role], engine_only=part == "engine")
        tokens = [*first["choices"][0]["token_ids"], *answer.result()]
    assert tokens == expected
    until(lambda: not any(_is_alive(process) for process in processes))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
