"""The whole cluster over verbs: one request whose KV takes no other way than RDMA, token for token right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.timeout(420)

MODEL = Path(__file__).parents[3] / "models" / "demo"
PROMPT = "import os\n\ndef list_files(path):\n" * 4
START_TIMEOUT_S = 300.0  # three interpreters import torch, emulated
NUM_TOKENS = 8


def test_a_request_is_served_with_its_kv_over_rdma(tmp_path: Path) -> None:
    flags = ("--transports", "rdma", "--num-threads", "1")
    small = ("--kv-cache-memory", "64MiB", "--dram", "64MiB")
    cluster = Cluster(None, *flags, *small, log_dir=tmp_path / "logs")
    try:
        cluster.wait_until_ready(START_TIMEOUT_S)
        answer = cluster.complete(
            PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, return_token_ids=True
        )
        counters = cluster.counters("prefill-0")
    finally:
        assert cluster.stop() == 0, cluster.output + cluster.logs()
    choice = answer["choices"][0]
    assert counters["handed_off_requests"] == 1
    assert choice["token_ids"] == _expected(choice["prompt_token_ids"])


def _expected(prompt: list[int]) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
