"""Helpers for simulator tests: a model profile with round numbers, handmade requests, and a checked run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.profile import DecodeProfile, PrefillProfile
from traces.format import TraceRecord
from traces.simulator.clock import Clock, Timed
from traces.simulator.coupled import CoupledCluster
from traces.simulator.events import Event
from traces.simulator.journey import Journey
from traces.simulator.run import cluster_of, journeys_of
from traces.simulator.spec import ClusterSpec, CoupledSpec, ModelProfile

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


def run_checked(spec: ClusterSpec | CoupledSpec, records: Sequence[TraceRecord]) -> tuple[Any, list[Journey]]:
    """Runs the trace, validates the cluster after every event, and returns the cluster and its requests."""
    journeys = journeys_of(records, spec.block_size, spec.model.max_model_len)
    cluster = CoupledCluster(spec, journeys) if isinstance(spec, CoupledSpec) else cluster_of(spec, journeys)

    def handle(event: Event, now: float) -> list[Timed[Event]]:
        following = cluster.handle(event, now)
        cluster.validate()
        return following

    clock: Clock[Event] = Clock()
    clock.run(cluster.begin(), handle)
    return cluster, journeys
