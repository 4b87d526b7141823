"""Lists the checks in their order and runs them in a process of their own.

A failed check does not end the run; one without time is skipped. A fault on a GPU spoils its process: every later call
fails, so the remaining checks get a new process. They also get one if a check ends the process or takes too long.
"""

import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
    Check("staging", 20, speed.staging_speed),
    Check("ahead", 20, decode_steps.steps_ahead),
    Check("workers", 60, handoff.whole_cluster),
    Check("handoff", 60, handoff.processes),
    Check("models", 60, speed.model_speed),
)
_LONGEST = 2
"""A check that takes longer than this many times `needs_s` is ended."""
_START_S = 60.0  # of a process, until its first check begins


def run_checks(bench: CheckContext, only: Sequence[str], deadline: float) -> Iterator[Row]:
    """Yields the rows of all checks whose name contains one of `only`. `deadline`: time of the monotonic clock."""
    remaining = [check for check in CHECKS if any(name in check.name for name in only)]
    process: _CheckProcess | None = None
    try:
        while remaining:
            check = remaining.pop(0)
            if deadline - time.monotonic() < check.needs_s:
                yield skipped(check.name, f"less than {check.needs_s:.0f} s were left")
                continue
            process = process or _CheckProcess(bench)
            until = min(deadline, time.monotonic() + _START_S + _LONGEST * check.needs_s)
            if not (yield from process.rows(check, until)):
                process.end()
                process = None
    finally:
        if process is not None:
            process.end()


class _CheckProcess:
    """A process that runs checks until one of them spoils it."""

    def __init__(self, bench: CheckContext) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        # Not a daemon: checks start processes.
        self._process = context.Process(target=_serve, args=(bench, other))
        self._process.start()
        other.close()

    def rows(self, check: Check, until: float) -> Generator[Row, None, bool]:
        """Yields the rows of a check. Returns False if the process can run no other."""
        try:
            self._end.send(check)
            while self._end.poll(max(0.0, until - time.monotonic())):
                received = self._end.recv()
                if not isinstance(received, Row):
                    return bool(received)
                yield received
            yield failed(check.name, TimeoutError("took too long and was ended"))
        except (EOFError, OSError):
            self._process.join(5)
            yield failed(check.name, RuntimeError(f"its process ended with {self._process.exitcode}"))
        return False

    def end(self) -> None:
        self._end.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(bench: CheckContext, end: Any) -> None:
    """Runs the checks that arrive. After each it sends whether the device still works."""
    while True:
        try:
            check = end.recv()
        except EOFError:
            return
        try:
            for row in check.rows(bench):
                end.send(row)
        except Exception as error:  # the other checks still run
            end.send(failed(check.name, error))
        end.send(_device_works(bench.device))


def _device_works(device: torch.device) -> bool:
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        return False
    return True
