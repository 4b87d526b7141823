"""Trying clusters: simulations in several processes, each told about once it is done and kept for another time.

A cluster is described by the options of `moonserve simulate`, so that a plan and a command line cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.errors import ConfigError
from protocol.progress import Progress
from traces.planner.cluster import Cluster, Score, score_of
from traces.simulator.command import SimulateConfig, specs_of
from traces.simulator.many import Archive, Run, TraceFile, do_missing
from traces.simulator.many import Progress as Done
from traces.simulator.spec import ClusterSpec


def options_of(cluster: Cluster, common: SimulateConfig) -> SimulateConfig:
    """What `moonserve simulate` takes to simulate this cluster."""
    return replace(
        common,
        prefill=cluster.num_prefill,
        decode=cluster.num_decode,
        policy=(cluster.policy,),
        dram_tokens=cluster.dram_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Of one trace."""

    common: SimulateConfig
    trace: TraceFile
    archive: Archive
    num_requests: int
    dram_tokens: int  # the largest cache of a prefill machine
    num_processes: int

    @classmethod
    def of(
        cls, common: SimulateConfig, limit: int | None, folder: Path, num_processes: int
    ) -> Trial:
        """Raises ConfigError for a trace, options or a folder that cannot be used."""
        specs = [spec for _, spec in specs_of(common)]  # one per policy
        for spec in specs:
            spec.check()
        trace = TraceFile(path=Path(common.trace), limit=limit)
        num_requests = len(trace.records())
        return cls(
            common=common,
            trace=trace,
            archive=Archive.of(folder, trace),
            num_requests=num_requests,
            dram_tokens=specs[0].model.dram_tokens,
            num_processes=num_processes,
        )

    def __call__(self, clusters: Sequence[Cluster], share: float) -> list[Score]:
        """One score per cluster, on the first `share` of the requests."""
        part = "the whole trace" if share == 1 else f"the first {share:.1%} of it"
        runs = {self._run(cluster, share): cluster for cluster in clusters}

        with Progress() as progress:

            def tell(done: Done) -> None:
                assert isinstance(done.work, Run)
                score = score_of(self.archive.read(done.work))
                cluster = runs[done.work]
                progress.note(
                    f"  {cluster.division} {cluster.policy}, {cluster.dram_tokens:,} tokens:"
                    f" {score.effective:.1%} effective ({done.took_s:.0f} s)"
                )
                text = f"{done.num_done} of {done.num_all}"
                progress.show("simulations", done.num_done, done.num_all, text)

            with progress.busy(f"{len(clusters)} clusters on {part}"):
                self._do(runs, tell)
        return [score_of(self.archive.read(run)) for run in runs]

    def _do(self, runs: Iterable[Run], tell: Callable[[Done], None]) -> None:
        do_missing(runs, self.trace, self.archive, num_processes=self.num_processes, tell=tell)

    def _run(self, cluster: Cluster, share: float) -> Run:
        options = options_of(cluster, self.common)
        ((_, spec),) = specs_of(options)
        if not isinstance(spec, ClusterSpec):
            raise ConfigError("a plan is for machines of two roles")
        count = None if share == 1 else math.ceil(share * self.num_requests)
        return Run(spec=spec, speedup=options.speedup, num_requests=count)
