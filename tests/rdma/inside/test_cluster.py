"""The whole cluster over verbs: one request whose KV takes no other way than RDMA, token for token right.

What is right the host has computed with transformers (tests/rdma/test_guest.py): importing it here is slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.rdma.expected import NUM_TOKENS, PROMPT, Expected

pytestmark = pytest.mark.timeout(840)

START_TIMEOUT_S = 720.0  # three interpreters import torch, emulated, beside other tests
RESULTS = Path("/run/job")


def test_a_request_is_served_with_its_kv_over_rdma(tmp_path: Path) -> None:
    # Compiling takes minutes on emulated processors.
    flags = ("--transports", "rdma", "--num-threads", "1", "--kernels", "torch")
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
    found = Expected(choice["prompt_token_ids"], choice["token_ids"])
    assert found == Expected.read(RESULTS)
