"""Effort of randomized tests: `make test`, ten times that (`make test-all`), or a hundred times (`make test-thorough`).

Owns one factor. A test's claim is the same in all three; only the number of examples differs. The thorough run also
draws new examples every time; an example that fails there becomes an `@example`.
"""

import os
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

_FACTOR = float(os.environ.get("MOONSERVE_TEST_EXAMPLES", "0.1"))
_FEWEST = 3

THOROUGH = _FACTOR >= 10


def examples(ordinary: int) -> int:
    """Returns the number of examples of a property test, given the number for `make test-all`."""
    return max(_FEWEST, round(ordinary * _FACTOR))


def any_order(
    machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int = 40, *, derandomize: bool = not THOROUGH
) -> type[TestCase]:
    """Returns the test of a state machine: `num_examples` as in `examples`, each of up to `num_steps` rules."""
    case: Any = machine.TestCase
    limits = {"max_examples": examples(num_examples), "stateful_step_count": num_steps}
    case.settings = settings(**limits, derandomize=derandomize)
    return case


def seconds(ordinary: float, thorough: float) -> float:
    """Returns the duration of an external condition, where it determines what a test sees."""
    return thorough if THOROUGH else ordinary


# The public conversation trace, which is not part of this repository.
_SHARED = Path(__file__).resolve().parents[2] / "shared/traces/conversation_trace.jsonl"
TRACE = Path(os.environ.get("MOONSERVE_TRACE", _SHARED))

needs_trace = pytest.mark.skipif(
    not TRACE.exists(), reason="needs the public trace: moonserve traces fetch, and its path in MOONSERVE_TRACE"
)
