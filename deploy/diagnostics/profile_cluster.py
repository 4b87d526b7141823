"""Starts a cluster with `moonserve serve`, measures it from outside and stops it, for `moonserve profile --serving`.

Owns the cluster's start and the calibration of its turnover. `profile_probe` measures;
`profile_fit` derives the other coefficients.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moonserve.deploy.diagnostics.profile_fit import Burst, Observations, ServingTerms, fit_terms
from moonserve.deploy.diagnostics.profile_probe import Grid, Probe
from moonserve.deploy.launcher.local_cluster import LocalCluster, running_cluster
from moonserve.protocol.errors import ConfigError, MoonserveError
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.latency import mean
from moonserve.protocol.request import Role
from moonserve.traces.client import StreamClient
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.spec import ClusterSpec, Crowding, Overheads


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Size of a cluster on one machine. `flags`: further flags of `moonserve serve`."""

    model: Path | None  # None: the demo model
    num_prefill: int
    num_decode: int
    num_threads: int
    flags: tuple[str, ...] = ()

    @contextlib.contextmanager
    def running(self) -> Iterator[LocalCluster]:
        """Yields a ready cluster of this shape and stops it at the end of the block."""
        with (
            tempfile.TemporaryDirectory() as log_dir,
            running_cluster(self.model, *self.serve_flags(), log_dir=Path(log_dir)) as cluster,
        ):
            yield cluster

    def serve_flags(self) -> list[str]:
        """Returns the flags of `moonserve serve`. There is one store node per prefill worker, as in the simulator."""
        sizes = {
            "--prefill-workers": self.num_prefill,
            "--decode-workers": self.num_decode,
            "--store-nodes": self.num_prefill,
            "--num-threads": self.num_threads,
        }
        return [*(str(part) for pair in sizes.items() for part in pair), *self.flags]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a model's KV takes, and how much of it a worker holds."""

    num_layers: int
    token_bytes: int
    device_tokens: int  # of one worker
    max_model_len: int

    @classmethod
    def of_cluster(cls, view: Mapping[str, Any]) -> "ModelSize":
        """Takes it from the answer of /v1/cluster."""
        layout = KvLayout(**view["layout"])
        num_blocks = min(each["num_blocks"] for each in view["instances"] if each["role"] == Role.PREFILL.value)
        return cls(
            num_layers=layout.num_layers,
            token_bytes=layout.block_bytes // layout.block_size,
            device_tokens=num_blocks * layout.block_size,
            max_model_len=view["max_model_len"],
        )


def measure(
    shape: ClusterShape, grid: Grid, *, chunk_tokens: int, budget_s: float
) -> tuple[ServingTerms, Observations, ModelSize]:
    """Takes `budget_s` plus the time to start. Raises ConfigError if the cluster does not start or answer."""

    async def observe(url: str) -> tuple[Observations, ModelSize]:
        async with StreamClient(url) as client:
            probe = Probe(client, await client.model(None), grid)
            seen = await probe.observe(shape.num_prefill, budget_s)
            return seen, ModelSize.of_cluster(await client.cluster())

    try:
        with shape.running() as cluster:
            seen, size = asyncio.run(observe(cluster.url))
    except ConfigError:
        raise
    except MoonserveError as error:
        raise ConfigError(f"the cluster to be measured: {error.message}") from error
    return fit_terms(seen, chunk_tokens), seen, size


def overheads_text(overheads: Overheads, crowding: Crowding) -> Sequence[str]:
    """Returns lines for people: overheads of serving and crowding factors."""
    seconds = {
        "request, beside its computing": overheads.request_s,
        "… of it at the gateway by turns": overheads.gateway_s,
        "… of it the first token's way": overheads.back_s,
        "… longer beside another prompt": overheads.late_back_s,
        "prompt right after another": overheads.turnover_s,
        "landing, until it is granted": overheads.landing_s,
        "handoff, beside its KV": overheads.handoff_s,
    }
    factors = {
        "… beside 0, 1, … prefills": crowding.handoff,
        "prefill beside 0, 1, … others": crowding.prefill,
        "… that are all prefill machines": crowding.prefill_beside_prefills,
        "decode beside 0, 1, … others": crowding.decode,
        "… of a batch": crowding.decode_batch,
        "request beside 0, 1, … others": crowding.request,
        "landing beside 0, 1, … others": crowding.landing,
    }
    return [
        *(f"{name:31} {value * 1e3:8.2f} ms" for name, value in seconds.items()),
        *(
            f"{name:31} {'  '.join(f'{factor:.2f}' for factor in found) or 'not measured'}"
            for name, found in factors.items()
        ),
    ]


_APART_S = 60.0  # between simulated bursts, so that they do not overlap
_MOST_S = 0.25  # upper bound of the turnover
_HALVINGS = 12  # precise to a sixteenth of a millisecond


def fit_turnover(spec: ClusterSpec, bursts: Sequence[Burst]) -> ClusterSpec:
    """Returns `spec` with the turnover at which its simulated mean TTFT is that of the bursts. No bursts: no change."""
    if not bursts:
        return spec
    wanted_s = mean([each.token_at[0] - each.sent_at for burst in bursts for each in burst])
    records = _records(bursts, spec.block_size)

    def of(turnover_s: float) -> ClusterSpec:
        overheads = replace(spec.model.overheads, turnover_s=turnover_s)
        return replace(spec, model=replace(spec.model, overheads=overheads))

    low, high = 0.0, _MOST_S
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        outcomes = simulate(of(middle), records).outcomes
        if mean([each.ttft_s for each in outcomes if each.ttft_s is not None]) < wanted_s:
            low = middle
        else:
            high = middle
    return of(low)


def _records(bursts: Sequence[Burst], block_size: int) -> list[TraceRecord]:
    """Returns the bursts as a trace in the order of sending. No two prompts share a block."""
    records: list[TraceRecord] = []
    next_id = 0
    for number, burst in enumerate(bursts):
        for each in sorted(burst, key=lambda answered: answered.sent_at):
            num_blocks = -(-each.prompt.num_tokens // block_size)
            records.append(
                TraceRecord(
                    arrived_s=number * _APART_S,
                    input_length=each.prompt.num_tokens,
                    output_length=len(each.token_at),
                    hash_ids=tuple(range(next_id, next_id + num_blocks)),
                    tokens_per_hash=block_size,
                )
            )
            next_id += num_blocks
    return records
