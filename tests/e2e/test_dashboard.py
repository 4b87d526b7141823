"""The gateway's page in a real browser, beside a cluster under load."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from models import demo_model_path
from tests.e2e.cluster import running_cluster
from tests.e2e.load import BackgroundLoad
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "gateway" / "dashboard.html"


def rendered(url: str, profile: Path) -> str:
    """The page's elements after two looks at the cluster; skips the test without a browser."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs chromium (.ci/system-packages)")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=4000"]
    command += [f"--user-data-dir={profile}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    return done.stdout


def test_the_page_shows_the_cluster_under_load(tmp_path: Path) -> None:
    with (
        running_cluster(demo_model_path(), tmp_path / "logs") as cluster,
        BackgroundLoad(cluster, 4096, streams=2),
    ):
        for _ in range(2):
            cluster.complete("the same beginning, again and again " * 12, max_tokens=4)
        shown = rendered(f"{cluster.url}/dashboard", tmp_path / "profile")
    assert re.search(r'id="state"[^>]*>ready<', shown)
    for instance in ("prefill-0", "decode-0", "store-0"):
        assert instance in shown
    for part in ("TTFT, p95", "Between tokens, p95", "Rejected", "Transfers by rail"):
        assert part in shown
    assert "Hot prefixes" in shown
    assert re.search(r"p50 [0-9.]+ m?s", shown), "latencies of the last minute"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.search(r"""(?:src|href)\s*=|@import|https?://|url\(""", text)
