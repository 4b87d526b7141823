"""A whole cluster whose KV travels inside TLS."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.cluster import running_cluster
from tests.transfer.tls.authority import Authority

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl (.ci/system-packages)")
def test_a_request_is_served_with_encrypted_kv(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("cluster", names="IP:127.0.0.1")
    flags = {
        "--transports": "tcp",
        "--transfer-tls-certificate": files.certificate,
        "--transfer-tls-key": files.key,
        "--transfer-tls-authority": files.authority,
    }
    pairs = (str(part) for pair in flags.items() for part in pair)
    with running_cluster(None, tmp_path / "logs", *pairs) as cluster:
        prompt = "import os\n\ndef list_files(path):\n" * 20
        answers = [
            cluster.complete(prompt, max_tokens=16, temperature=0)["choices"][0]["text"]
            for _ in range(2)
        ]
        assert answers[0] == answers[1] != ""
        assert cluster.counters("prefill-0")["handed_off_requests"] == 2
        assert not cluster.tracebacks()
