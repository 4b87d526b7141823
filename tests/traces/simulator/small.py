"""Helpers for simulator tests: a model profile with round numbers, handmade requests, and a checked run."""

from collections.abc import Sequence
from typing import Any

from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.coupled import CoupledCluster
from moonserve.traces.simulator.cluster.event_loop import Event, EventLoop, TimedEvent
from moonserve.traces.simulator.cluster.request_state import RequestState
from moonserve.traces.simulator.cluster.run import cluster_of, request_states_of
from moonserve.traces.simulator.spec import ClusterSpec, CoupledSpec, ModelProfile

BLOCK = 10

MODEL = ModelProfile(
    name="round",
    prefill=PrefillProfile(c0=0.0, c1=0.01, c2=0.0),  # 100 tokens per second
    decode=DecodeProfile(c0=0.05, c1=0.0, c2=0.0),
    kv_bytes_per_token=400,
    num_layers=2,
    nic_bytes_per_s=1e9,
    device_bytes_per_s=1e9,
    disk_bytes_per_s=1e9,
    device_tokens=10_000,
    dram_tokens=10_000,
    max_num_seqs=64,
    max_model_len=5_000,
)


def spec(**changes: Any) -> ClusterSpec:
    usual = {"model": MODEL, "num_prefill": 1, "num_decode": 1, "block_size": BLOCK, "admission": "none"}
    return ClusterSpec(**{**usual, **changes})


def request(
    at: float, num_tokens: int, num_outputs: int, hash_ids: Sequence[int] = (), base: int = 0, tenant: str = ""
) -> TraceRecord:
    """Returns a trace record. `hash_ids`: the first hash ids; the remaining ones are `base`, `base` + 1, …"""
    count = -(-num_tokens // BLOCK)
    ids = hash_ids[:count]
    return TraceRecord(
        arrived_s=at,
        input_length=num_tokens,
        output_length=num_outputs,
        hash_ids=(*ids, *range(base, base + count - len(ids))),
        tokens_per_hash=BLOCK,
        tenant=tenant,
    )


def run_checked(spec: ClusterSpec | CoupledSpec, records: Sequence[TraceRecord]) -> tuple[Any, list[RequestState]]:
    """Runs the trace, validates the cluster after every event, and returns the cluster and its requests."""
    states = request_states_of(records, spec.block_size, spec.model.max_model_len)
    cluster = CoupledCluster(spec, states) if isinstance(spec, CoupledSpec) else cluster_of(spec, states)

    def handle(event: Event, now: float) -> list[TimedEvent[Event]]:
        following = cluster.handle(event, now)
        cluster.validate()
        return following

    clock: EventLoop[Event] = EventLoop()
    clock.run(cluster.begin(), handle)
    return cluster, states
