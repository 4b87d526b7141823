"""A killed rank of a decode worker costs only time: the request continues with the worker's successor."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.cluster import GREEDY, Cluster, prompt_of
from tests.e2e.load import read_choice
from tests.e2e.reference import one_engines

pytestmark = pytest.mark.e2e

FLAGS = (
    *("--dtype", "float32", "--kernels", "native", "--block-size", "32"),
    *("--kv-cache-memory", "32MiB", "--max-num-batched-tokens", "64", "--ttft-slo", "10000"),
    *("--num-threads", "2", "--decode-tensor-parallel-size", "2"),
)
CONTEXT = 16_384
LOGS_WITH_TRACEBACKS = {"decode-0.log"}  # from the step that its rank did not complete
ANSWER = 300  # tokens


def test_a_stream_continues_when_a_rank_of_its_decode_worker_is_killed(cluster: Cluster) -> None:
    """The worker ends with its rank, logs the reason, and restarts. The tokens equal those of a single engine."""
    prompt = prompt_of("rank", 40)
    killed: list[int] = []
    ranks = psutil.Process(cluster.pids()["decode-0"]).children()
    assert ranks

    def on_tokens(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(cluster.epoch("decode-0"))
            for rank in ranks:
                rank.kill()

    with cluster.client() as client:
        wish = {"prompt": prompt, "max_tokens": ANSWER, **GREEDY}
        said = read_choice(client, wish, on_tokens)
    assert said.token_ids == one_engines(cluster.model, [prompt], ANSWER, 32)[0], cluster.logs()
    cluster.wait_for("its successor", lambda: cluster.epoch("decode-0") > killed[0])
    cluster.wait_for("the end of its ranks", lambda: all(map(has_ended, ranks)))
    log = (cluster.log_dir / "decode-0.log").read_text()
    assert "a rank is lost, so this worker ends" in log


def has_ended(process: psutil.Process) -> bool:
    """True if the process has ended, even if its exit code has not been collected."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
