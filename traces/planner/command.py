"""`moonserve plan TRACE`: finds the cluster to build for a trace.

Clusters are simulated in several processes. Each result is reported when it is done and kept for later runs. A cluster
is described by the options of `moonserve simulate`, so that a plan and a command line cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conductor.policies import DEFAULT_POLICY, POLICY_CHOICES, PUBLISHED_POLICY
from protocol.config import option, run_command
from protocol.errors import ConfigError
from protocol.progress import Progress
from traces.output import write_text
from traces.planner.answer import Answer, format_answer, options_of, to_json
from traces.planner.search import Cluster, Question, Score, bound, plan, score_of
from traces.simulator.command import SimulateConfig, specs_of
from traces.simulator.many import INTERRUPTED, Archive, Run, TraceFile, do_missing
from traces.simulator.many import Progress as Done
from traces.simulator.profiles import LLAMA3_70B_8XA800, PROFILES
from traces.simulator.spec import ADMISSIONS, ClusterSpec

PROG = "moonserve plan"
_EXIT_NOT_MET = 1
_MAX_MACHINES = 1024
_PLAN, _RUNS = "plan.json", "runs"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Options of `moonserve plan`."""

    trace: str = option(help="trace file, JSON lines; also as the first argument")
    slo_ttft: float = option(30.0, help="objective for the first token, seconds")
    slo_tbt: float = option(0.1, help="objective between tokens, seconds")
    target: float = option(0.9, help="share of requests that must keep both, for the smallest cluster")
    nodes: int = option(16, help="machines there are")
    policies: tuple[str, ...] = option(
        (PUBLISHED_POLICY, DEFAULT_POLICY),
        help=f"placements to try, commas between: {POLICY_CHOICES}",
    )
    model_profile: str = option(
        LLAMA3_70B_8XA800.name,
        help=f"{', '.join(PROFILES)}, or a file that moonserve profile --json wrote",
    )
    dram_tokens: int | None = option(
        None,
        help="the largest cache of a prefill machine, tokens of KV; the profile's if not given",
    )
    admission: str = option(SimulateConfig.admission, help="as in moonserve simulate", choices=ADMISSIONS)
    speedup: float = option(1.0, help="factor on the trace's clock: what if there were more users?")
    limit: int | None = option(None, help="only this many requests, the first ones")
    processes: int = option(2, help="simulations at once")
    out: str = option("out/plan", help="folder for plan.json and the simulations")


def main(argv: Sequence[str]) -> int:
    """Runs `argv`, the arguments after `plan`; the first may be the trace. Returns 1 if no cluster meets the target."""
    return run_command(PlanConfig, run, argv, prog=PROG, positional="--trace", interrupted=INTERRUPTED)


def run(config: PlanConfig) -> int:
    """Searches, writes and prints the plan. Raises ConfigError before any simulation, except if the disk is full."""
    _check(config)
    trial = Trial.of(_options(config), config.limit, Path(config.out) / _RUNS, config.processes)
    question = Question(
        num_machines=config.nodes,
        target=config.target,
        policies=config.policies,
        dram_tokens=trial.dram_tokens,
    )
    print(f"at most {bound(question):.0f} times the whole trace, parts of it counted as such")
    found = plan(question, trial)
    answer = Answer(
        trace=Path(config.trace).name,
        num_requests=trial.num_requests,
        options=_options(config),
        question=question,
        plan=found,
    )
    path = Path(config.out) / _PLAN
    write_text(path, to_json(answer))
    print(f"\n{format_answer(answer)}\n\n{path}")
    return 0 if found.smallest is not None else _EXIT_NOT_MET


def _options(config: PlanConfig) -> SimulateConfig:
    """Returns the simulator's options that all clusters have in common."""
    return SimulateConfig(
        trace=config.trace,
        limit=config.limit,
        speedup=config.speedup,
        model_profile=config.model_profile,
        policy=config.policies,
        admission=config.admission,
        ttft_slo=config.slo_ttft,
        tbt_slo=config.slo_tbt,
        dram_tokens=config.dram_tokens,
    )


def _check(config: PlanConfig) -> None:
    if not 2 <= config.nodes <= _MAX_MACHINES:
        raise ConfigError(f"--nodes must be 2 to {_MAX_MACHINES}: one for each role at least")
    if not 0 < config.target <= 1:
        raise ConfigError("--target is a share of requests: above 0, at most 1")
    if not config.policies:
        raise ConfigError("--policies must name one at least")
    if len(set(config.policies)) != len(config.policies):
        raise ConfigError("--policies names one twice")
    if config.processes < 1:
        raise ConfigError("--processes must be at least 1")
    if not config.speedup > 0 or (config.limit is not None and config.limit < 1):
        raise ConfigError("--speedup must be above 0 and --limit at least 1")
    if not (0 < config.slo_ttft < math.inf and 0 < config.slo_tbt < math.inf):
        raise ConfigError("--slo-ttft and --slo-tbt must be above 0")
    if config.dram_tokens is not None and config.dram_tokens < 1:
        raise ConfigError("--dram-tokens must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Scores clusters by simulating one trace."""

    common: SimulateConfig
    trace: TraceFile
    archive: Archive
    num_requests: int
    dram_tokens: int  # largest cache of a prefill machine
    num_processes: int

    @classmethod
    def of(cls, common: SimulateConfig, limit: int | None, folder: Path, num_processes: int) -> Trial:
        """Prepares trials. Raises ConfigError for an unusable trace, options or folder."""
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
        """Returns one score per cluster, on the first `share` of the requests."""
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
                do_missing(runs, self.trace, self.archive, num_processes=self.num_processes, tell=tell)
        return [score_of(self.archive.read(run)) for run in runs]

    def _run(self, cluster: Cluster, share: float) -> Run:
        options = options_of(cluster, self.common)
        ((_, spec),) = specs_of(options)
        if not isinstance(spec, ClusterSpec):
            raise ConfigError("a plan is for machines of two roles")
        count = None if share == 1 else math.ceil(share * self.num_requests)
        return Run(spec=spec, speedup=options.speedup, num_requests=count)
