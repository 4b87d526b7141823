"""Workers under one budget of memory: it is taken by blocks and given back, limits change under load and never a token,
and who is killed leaves its share to the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.kvctl.main import main as kvctl
from engine.elastic.ledger import Ledger
from tests.e2e.cluster import GREEDY, Cluster, prompt_of, small_cluster
from tests.e2e.reference import Continuation, continuations, load_reference, num_ties
from tests.e2e.sse import read_choice

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KIB, MIB = 1 << 10, 1 << 20
BUDGET = 3 * MIB
PAGE = 256 * KIB  # of this model: 64 KiB of K and of V in each of 2 layers, 32 blocks
FLAGS = (
    *("--dtype", "float32", "--kernels", "native", "--block-size", "16"),
    *("--kv-cache-memory", "16MiB", "--kv-memory-budget", str(BUDGET), "--ttft-slo", "10000"),
    *("--num-threads", "1", "--admission", "none", "--store-nodes", "0"),
)
NUM_TOKENS = 40
NUM_PROMPTS = 16  # of 200 tokens, which with the answer take 15 blocks: two fit into a page, all of them do not
ATTEMPTS = 8
ANSWER = 300  # tokens of a long one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with small_cluster(tmp_path_factory.mktemp("elastic"), *FLAGS, context=4_096) as started:
        yield started
        assert started.tracebacks() == [], started.logs()


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    return cluster.log_dir.parent / "model"


def prompts_of(name: str) -> list[list[int]]:
    return [prompt_of(f"{name} {number}", 200) for number in range(NUM_PROMPTS)]


def ask(cluster: Cluster, prompt: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return cluster.greedy(prompt, num_tokens, logprobs=0)


def resident(cluster: Cluster, instance_id: str) -> int:
    """Bytes of its pool that the kernel has for the worker (/proc/PID/smaps)."""
    total, is_pool = 0, False
    smaps = Path(f"/proc/{cluster.pids()[instance_id]}/smaps").read_text()
    for line in smaps.splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            is_pool = "memfd:moonserve:kv" in line and " rw-s " in line  # others' are only read
        elif is_pool and first == "Rss:":
            total += int(line.split()[1]) * KIB
    return total


def limits(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, dict[str, Any]]:
    """What `kvctl` prints, by worker."""
    capsys.readouterr()
    environ = {"MOONSERVE_CLUSTER_TOKEN": cluster.token}
    assert kvctl(["--json", *arguments, "--url", cluster.url], environ) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["worker"]: line for line in lines}


@contextmanager
def shares(cluster: Cluster) -> Iterator[Ledger]:
    ledger = Ledger(cluster.log_dir / "kv-memory", budget=1)
    try:
        yield ledger
    finally:
        ledger.close()


def held(ledger: Ledger) -> dict[str, int]:
    return {row.name: row.held for row in ledger.rows()}


def test_memory_is_taken_by_blocks_and_a_lower_limit_gives_it_back(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = limits(cluster, capsys, "limits")
    assert set(shown) == {"prefill-0", "decode-0"}
    assert shown["decode-0"]["largest_bytes"] == shown["decode-0"]["ceiling_bytes"] == 16 * MIB
    assert shown["decode-0"]["budget_bytes"] == BUDGET
    # The marker's page belongs to the mapping.
    assert max(resident(cluster, name) for name in shown) <= 12 * PAGE

    ask(cluster, prompt_of("long", 2_000))
    blocks = 2_000 // 16 * 8 * KIB
    assert resident(cluster, "prefill-0") >= blocks
    assert resident(cluster, "decode-0") >= blocks

    assert (
        limits(cluster, capsys, "limit", "decode-0", "256KiB")["decode-0"]["ceiling_bytes"] == PAGE
    )
    cluster.wait_for("its memory", lambda: resident(cluster, "decode-0") <= PAGE + 4 * KIB)
    after = limits(cluster, capsys, "limit", "decode-0", "16MiB")["decode-0"]
    assert after["held_bytes"] <= BUDGET
    assert resident(cluster, "prefill-0") >= blocks


def test_limits_that_change_under_load_change_no_token(
    cluster: Cluster, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_of("load")
    expected = continuations(load_reference(model), prompts, NUM_TOKENS)
    for _ in range(ATTEMPTS):
        before = cluster.status("decode-0").load.num_preemptions
        ties = take_while_limits_change(cluster, prompts, expected, capsys)
        assert ties <= 1
        if cluster.status("decode-0").load.num_preemptions > before:
            break
    else:
        raise AssertionError("no limit ever came in the middle of a sequence")


def take_while_limits_change(
    cluster: Cluster,
    prompts: list[list[int]],
    expected: list[Continuation],
    capsys: pytest.CaptureFixture[str],
) -> int:
    """How many answers differ where two choices are equally good; fails where one differs otherwise."""
    over = threading.Event()
    with ThreadPoolExecutor(len(prompts)) as pool, shares(cluster) as ledger:
        asked = [pool.submit(ask, cluster, prompt) for prompt in prompts]
        ceilings = iter(["256KiB", "2MiB", "512KiB", "16MiB"] * 1_000)
        while not all(each.done() for each in asked):
            shown = limits(cluster, capsys, "limit", "decode-0", next(ceilings))
            assert shown["decode-0"]["floor_bytes"] <= shown["decode-0"]["ceiling_bytes"]
            assert sum(held(ledger).values()) <= BUDGET
            over.wait(0.02)
        limits(cluster, capsys, "limit", "decode-0", "16MiB")
        return sum(num_ties(a.result(), e) for a, e in zip(asked, expected, strict=True))


def test_what_one_worker_caches_makes_room_for_what_another_runs(
    cluster: Cluster, model: Path
) -> None:
    """The prompts of all rounds together are more than the budget, and stay cached while nobody needs the memory."""
    reference = load_reference(model)
    with shares(cluster) as ledger:
        for name in ("first", "second", "third"):
            prompts = prompts_of(name)
            expected = continuations(reference, prompts, 4)
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda prompt: ask(cluster, prompt, 4), prompts))
            ties = sum(num_ties(a, e) for a, e in zip(answers, expected, strict=True))
            assert ties <= 1
            assert 0 < sum(held(ledger).values()) <= BUDGET


def test_a_killed_workers_share_is_free_and_its_successor_has_a_place(
    cluster: Cluster, model: Path
) -> None:
    prompt = prompt_of("killed", 200)
    [expected] = continuations(load_reference(model), [prompt], ANSWER)
    epochs: list[int] = []

    def kill_once(num_tokens: int) -> None:
        if num_tokens and not epochs:
            assert held(ledger)["decode-0"] > 0
            epochs.append(cluster.kill("decode-0"))

    with shares(cluster) as ledger, cluster.client() as client:
        wish = {"prompt": prompt, "max_tokens": ANSWER, **GREEDY}
        tokens = read_choice(client, wish, kill_once).token_ids
        cluster.wait_for("its successor", lambda: cluster.epoch("decode-0") > epochs[0])
        assert sorted(row.name for row in ledger.rows()) == ["decode-0", "prefill-0"]
        assert sum(held(ledger).values()) <= BUDGET
    if tokens != expected.token_ids:
        pairs = enumerate(zip(tokens, expected.token_ids, strict=True))
        index = next(index for index, (found, wanted) in pairs if found != wanted)
        assert expected.is_tie(index, tokens[index])
