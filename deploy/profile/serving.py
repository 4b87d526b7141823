"""Starts a cluster as `moonserve serve` does, measures it from outside, stops it: `moonserve profile --serving`.

Knows how to start what is to be measured; what is measured is `probe`'s business, what follows from it `terms`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local import LocalCluster, running
from deploy.profile.probe import Grid, Probe
from deploy.profile.runs import Observations
from deploy.profile.terms import ServingTerms, terms_of
from protocol.errors import ConfigError, MoonserveError
from traces.client import StreamClient
from traces.simulator.spec import Crowding, Overheads


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """A cluster of one machine. `flags`: further ones of `moonserve serve`."""

    model: Path | None  # None: the demo model
    num_prefill: int
    num_decode: int
    num_threads: int
    flags: tuple[str, ...] = ()

    @contextlib.contextmanager
    def running(self) -> Iterator[LocalCluster]:
        """A ready cluster of this shape, stopped at the end of the block."""
        with (
            tempfile.TemporaryDirectory() as log_dir,
            running(self.model, *self.serve_flags(), log_dir=Path(log_dir)) as cluster,
        ):
            yield cluster

    def serve_flags(self) -> list[str]:
        """A store node beside each prefill worker, as the simulator has it."""
        sizes = {
            "--prefill-workers": self.num_prefill,
            "--decode-workers": self.num_decode,
            "--store-nodes": self.num_prefill,
            "--num-threads": self.num_threads,
        }
        return [*(str(part) for pair in sizes.items() for part in pair), *self.flags]


def measure(
    shape: ClusterShape, grid: Grid, *, chunk_tokens: int, budget_s: float, seed: int = 0
) -> tuple[ServingTerms, Observations]:
    """Takes `budget_s` and the time to start. Raises ConfigError when the cluster does not come up or answer."""
    try:
        with shape.running() as cluster:
            seen = asyncio.run(_observe(cluster.url, shape.num_prefill, grid, budget_s, seed))
    except ConfigError:
        raise
    except MoonserveError as error:
        raise ConfigError(f"the cluster to be measured: {error.message}") from error
    return terms_of(seen, chunk_tokens), seen


async def _observe(
    url: str, num_prefill: int, grid: Grid, budget_s: float, seed: int
) -> Observations:
    async with StreamClient(url) as client:
        probe = Probe(client, await client.model(None), grid, seed)
        return await probe.observe(num_prefill, budget_s)


def as_text(overheads: Overheads, crowding: Crowding) -> Sequence[str]:
    """What serving adds, for people."""
    return (
        f"request, beside its computing   {overheads.request_s * 1e3:8.2f} ms",
        f"… of it at the gateway by turns {overheads.gateway_s * 1e3:8.2f} ms",
        f"… of it the first token's way   {overheads.back_s * 1e3:8.2f} ms",
        f"… longer beside another prompt  {overheads.late_back_s * 1e3:8.2f} ms",
        f"prompt right after another      {overheads.turnover_s * 1e3:8.2f} ms",
        f"landing, until it is granted    {overheads.landing_s * 1e3:8.2f} ms",
        f"handoff, beside its KV          {overheads.handoff_s * 1e3:8.2f} ms",
        f"… beside 0, 1, … prefills       {_factors(crowding.handoff)}",
        f"prefill beside 0, 1, … others   {_factors(crowding.prefill)}",
        f"… that are all prefill machines {_factors(crowding.prefill_beside_prefills)}",
        f"decode beside 0, 1, … others    {_factors(crowding.decode)}",
        f"… of a batch                    {_factors(crowding.decode_batch)}",
        f"request beside 0, 1, … others   {_factors(crowding.request)}",
        f"landing beside 0, 1, … others   {_factors(crowding.landing)}",
    )


def _factors(factors: Sequence[float]) -> str:
    return "  ".join(f"{factor:.2f}" for factor in factors) or "not measured"
