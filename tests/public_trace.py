"""Path of the public conversation trace, for tests that need it. The trace is not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SHARED = Path(__file__).resolve().parents[2] / "shared/traces/conversation_trace.jsonl"
TRACE = Path(os.environ.get("MOONSERVE_TRACE", _SHARED))

needs_trace = pytest.mark.skipif(
    not TRACE.exists(), reason="needs the public trace: moonserve traces fetch, and its path in MOONSERVE_TRACE"
)
