"""Reading a process's metrics as Prometheus does."""

from __future__ import annotations

import urllib.request

from tests.patience import PATIENCE_S


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as response:
        text: str = response.read().decode()
        return text
