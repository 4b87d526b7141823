"""How hard tests with chance in them try: as much as a change affords (`make test`), ten times that (`make test-all`),
or a hundred times (`make test-thorough`, for the night).

Owns one factor. What a test claims is the same in all; only how many examples are looked at differs, and that the
thorough run draws others every time: what it finds becomes an `@example`.
"""

from __future__ import annotations

import os

_FACTOR = float(os.environ.get("MOONSERVE_TEST_EXAMPLES", "0.1"))
_FEWEST = 3

THOROUGH = _FACTOR >= 10


def examples(ordinary: int) -> int:
    """Number of examples of a property test, given how many `make test-all` affords."""
    return max(_FEWEST, round(ordinary * _FACTOR))


def seconds(ordinary: float, thorough: float) -> float:
    """How long something outside is made to last, where that decides what a test sees."""
    return thorough if THOROUGH else ordinary
