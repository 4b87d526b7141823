"""vLLM's workers on a real Ray: deployed from one file, they serve, also after the death of a process."""

import os
from pathlib import Path

import psutil
import pytest

from moonserve.deploy.ray.command import deploy
from moonserve.deploy.ray.config import parse_cluster
from moonserve.deploy.ray.events import RemoveCluster
from tests.deploy.ray.test_ray import SERVE, TOKEN, Deployed, document, ray_cluster
from tests.patience import until
from tests.thoroughness import examples

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

VLLM = {"engine": "vllm", "vllm": ["enforce-eager", "max-num-seqs=32"], "dtype": "float32", "kv_cache_memory": "256MiB"}
PROMPT = [7 * number % 4_000 for number in range(300)]


def test_workers_serve_and_one_that_died_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("MOONSERVE_VLLM_PYTHON")
    if python is None or examples(100) < 100:
        pytest.skip("takes a minute: MOONSERVE_TEST_EXAMPLES=1 make test-vllm")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    one = {kind: {"count": 1} for kind in ("prefill", "decode", "gateways")}
    values = document(tmp_path)
    serve = {name: value for name, value in values["serve"].items() if name not in SERVE}
    values |= one | {
        "conductors": {**values["conductors"], "count": 1},
        "serve": serve | VLLM | {"vllm_python": python},
    }
    config = parse_cluster(values)
    with ray_cluster(2):
        cluster = Deployed(config, deploy(config, TOKEN), tmp_path)
        cluster.settled()
        answer = cluster.complete(PROMPT)
        assert len(answer) == 16
        [worker] = [
            process
            for process in psutil.process_iter(["cmdline"])
            if {"decode-0", python} <= set(process.info["cmdline"] or ())
        ]
        worker.kill()
        until(lambda: not worker.is_running())
        assert cluster.complete(PROMPT) == answer
        cluster.deployment.send(RemoveCluster())
        cluster.wait(lambda status: bool(status["has_ended"]))
        cluster.deployment.end()
