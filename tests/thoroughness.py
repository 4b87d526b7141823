"""How hard tests with chance in them try: enough for a change, or ten times that (`make test-thorough`, for the night).

Owns one factor. What a test claims is the same in both; only how many examples are looked at differs, and that the
thorough run draws others every time: what it finds becomes an `@example`.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("MOONSERVE_THOROUGH", "") not in ("", "0")


def examples(ordinary: int) -> int:
    """Of a property test, given how many an ordinary run affords."""
    return ordinary * 10 if THOROUGH else ordinary


def seconds(ordinary: float, thorough: float) -> float:
    """How long something outside is made to last, where that decides what a test sees."""
    return thorough if THOROUGH else ordinary
