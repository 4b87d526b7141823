"""Small trace files for tests, with enough shared prefixes that every figure has data."""

from itertools import islice
from pathlib import Path
from random import Random

from moonserve.traces.workload.generator import ArrivalSpec, Constant, LogNormal, WorkloadSpec, requests_of
from moonserve.traces.workload.synthesize import write_trace

SESSIONS = WorkloadSpec(
    arrivals=ArrivalSpec(rate=2, process="constant"),
    input_tokens=LogNormal(2000, 0.5),
    output_tokens=LogNormal(20, 0.5),
    system_share=1,
    system_prompts=1,
    system_tokens=Constant(512),
    session_share=1,
    turns=8,
    turn_tokens=LogNormal(1500, 0.5),
    think_s=Constant(1),
)


def write_sessions(path: Path, num_requests: int = 40) -> Path:
    """Writes sessions of growing prompts with one common block, at two requests per second. Deterministic."""
    write_trace(path, islice(requests_of(SESSIONS, Random(3)), num_requests))
    return path


# The specification that `synthesize` builds from the options in tests/traces/workload/test_generator.py.
SMALL = WorkloadSpec(
    arrivals=ArrivalSpec(rate=5, process="gamma", burstiness=2),
    input_tokens=LogNormal(3000, 1),
    output_tokens=LogNormal(300, 0.8),
    max_input_tokens=32_000,
    system_prompts=3,
    system_tokens=Constant(600),
    session_share=0.4,
    turn_tokens=LogNormal(700, 1),
    think_s=LogNormal(60, 0.8),
)


def write_small(path: Path) -> Path:
    """Writes 1,500 requests over five minutes, with the statistics of a chat workload."""
    write_trace(path, islice(requests_of(SMALL, Random(7)), 1500))
    return path
