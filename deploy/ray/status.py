"""A cluster on Ray as `moonserve deploy status` shows it. Pure."""

from __future__ import annotations

from typing import Any

from deploy.ray.events import Report
from deploy.ray.process import Process
from deploy.ray.state import ControllerState

PLACING = "placing"  # Ray is asked for it


def status_of(state: ControllerState) -> dict[str, Any]:
    """In JSON's types."""
    processes = sorted(state.processes.values(), key=lambda each: each.unit)
    return {
        "name": state.config.name,
        "is_whole": state.is_whole,
        "is_restarting": state.is_restarting,
        "is_ending": state.is_ending,
        "wanted": {str(kind): count for kind, count in state.wanted.counts().items()},
        "missing": state.missing(),
        "processes": [_row(process, state.address_of(process)) for process in processes],
    }


def _row(process: Process, host: str) -> dict[str, Any]:
    report = process.report or Report(stage=PLACING)
    return {
        "name": process.name,
        "kind": str(process.unit.kind),
        "node_id": process.node_id,
        "host": host,
        "generation": process.generation,
        "is_leaving": process.is_leaving,
        "stage": report.stage,
        "failure": report.failure,
        "restarts": report.restarts,
        "life": report.life,
        "pid": report.pid,
        "facts": dict(report.facts),
    }
