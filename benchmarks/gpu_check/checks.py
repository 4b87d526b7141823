"""Lists the checks in their order and runs them. A failed check does not end the run; one without time is skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu_check import decode_steps, handoff, kernels, speed, token_parity
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.report import Row, failed, skipped


@dataclass(frozen=True, slots=True)
class Check:
    """A named group of rows of the table."""

    name: str
    needs_s: float  # skipped if less time is left
    rows: Callable[[CheckContext], Iterator[Row]]


CHECKS = (
    Check("attention kernels", 60, kernels.attention),
    Check("fused kernels", 20, kernels.fused),
    Check("token parity", 40, token_parity.families),
    Check("graphs", 30, decode_steps.graph_replays),
    Check("decode attention", 20, speed.decode_attention_speed),
    Check("prefill attention", 20, speed.prefill_attention_speed),
    Check("ahead", 20, decode_steps.steps_ahead),
    Check("handoff", 60, handoff.processes),
    Check("workers", 90, handoff.whole_cluster),
    Check("models", 90, speed.model_speed),
)


def run_checks(bench: CheckContext, only: str, deadline: float, checks: Sequence[Check] = CHECKS) -> Iterator[Row]:
    """Yields the rows of all checks whose name contains `only`. `deadline`: time of the monotonic clock."""
    for check in checks:
        if only not in check.name:
            continue
        if deadline - time.monotonic() < check.needs_s:
            yield skipped(check.name, f"less than {check.needs_s:.0f} s were left")
            continue
        try:
            yield from check.rows(bench)
        except Exception as error:  # the other checks still run
            yield failed(check.name, error)
