"""Workers under a shared memory budget: limits change under load and never change a token."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from moonserve.deploy.admin.kvctl import main as kvctl
from moonserve.engine.kv_cache.elastic_budget import Ledger
from tests.commands import Command
from tests.e2e.cluster import Cluster, prompt_of
from tests.e2e.reference import continuations, load_reference, num_ties

MIB = 1 << 20
BUDGET = 3 * MIB
FLAGS = (
    *("--dtype", "float32", "--kernels", "native", "--block-size", "16"),
    *("--kv-cache-memory", "16MiB", "--kv-memory-budget", str(BUDGET), "--ttft-slo", "10000"),
    *("--num-threads", "1", "--admission", "none", "--store-nodes", "0"),
)
CONTEXT = 4_096
NUM_TOKENS = 40
NUM_PROMPTS = 16  # of 200 tokens; each takes 15 blocks with its answer: two fit into a page, all of them do not
ATTEMPTS = 8


def limits(cluster: Cluster, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Returns the output of `kvctl` by worker."""
    run = Command(capsys, kvctl, environ={"MOONSERVE_CLUSTER_TOKEN": cluster.token})
    return {record["worker"]: record for record in run.json(*arguments, "--url", cluster.url)}


def test_changing_memory_limits_under_load_changes_no_token(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt_of(number, 200) for number in range(NUM_PROMPTS)]
    expected = continuations(load_reference(cluster.model), prompts, NUM_TOKENS)
    for _ in range(ATTEMPTS):
        before, over = cluster.status("decode-0").load.num_preemptions, threading.Event()
        shares = closing(Ledger(cluster.log_dir / "kv-memory", budget=1))
        with ThreadPoolExecutor(len(prompts)) as pool, shares as ledger:
            asked = [pool.submit(cluster.greedy, prompt, NUM_TOKENS, logprobs=0) for prompt in prompts]
            ceilings = iter(["256KiB", "2MiB", "512KiB", "16MiB"] * 1_000)
            while not all(each.done() for each in asked):
                shown = limits(cluster, capsys, "limit", "decode-0", next(ceilings))
                assert shown["decode-0"]["floor_bytes"] <= shown["decode-0"]["ceiling_bytes"]
                assert sum(row.held for row in ledger.rows()) <= BUDGET
                over.wait(0.02)
            limits(cluster, capsys, "limit", "decode-0", "16MiB")
        assert sum(num_ties(a.result(), e) for a, e in zip(asked, expected, strict=True)) <= 1
        if cluster.status("decode-0").load.num_preemptions > before:
            break
    else:
        raise AssertionError("no limit ever came in the middle of a sequence")
