"""`moonserve plan TRACE`: finds the cluster to build for a trace.

Clusters are simulated in several processes. Each result is reported when it is done and kept for later runs. A cluster
is described by the options of `moonserve simulate`, so that a plan and a command line cannot disagree.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pydantic_core

from moonserve.conductor.placement.policies import DEFAULT_POLICY, POLICY_CHOICES, PUBLISHED_POLICY
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command, to_flags
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.traces.experiments.parallel_runs import (
    INTERRUPTED,
    ClusterRun,
    JobProgress,
    ResultArchive,
    TraceFile,
    run_missing,
)
from moonserve.traces.experiments.plan_search import (
    CandidateCluster,
    Plan,
    PlanRequirements,
    Score,
    Scored,
    max_simulations,
    plan,
    score_of,
)
from moonserve.traces.experiments.simulate import SimulateConfig, specs_of
from moonserve.traces.output import (
    format_count,
    format_ms,
    format_ms_as_seconds,
    format_percent,
    text_table,
    write_text,
)
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800, PROFILES
from moonserve.traces.simulator.spec import ADMISSIONS, ClusterSpec

# Presents a plan as a table, as JSON, and as command lines that simulate and serve it. Pure: returns text.

PLAN_FORMAT = "moonserve plan 1"

_COLUMNS = (
    "prefill", "decode", "policy", "DRAM tokens", "effective", "goodput/s", "rejected",
    "TTFT s mean", "p90", "TBT ms p90", "hits",
)  # fmt: skip


def options_of(cluster: CandidateCluster, common: SimulateConfig) -> SimulateConfig:
    """Returns the `moonserve simulate` options for this cluster."""
    return replace(
        common,
        prefill=cluster.num_prefill,
        decode=cluster.num_decode,
        policy=(cluster.policy,),
        dram_tokens=cluster.dram_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan and the question that it answers."""

    trace: str  # the file's name
    num_requests: int
    options: SimulateConfig  # common to all clusters
    question: PlanRequirements
    plan: Plan

    def simulate(self, cluster: CandidateCluster) -> str:
        """Returns the command line that reproduces the plan's figures."""
        flags = to_flags(options_of(cluster, self.options))
        at = flags.index("--trace")
        return shlex.join(["moonserve", "simulate", flags[at + 1], *(flags[:at] + flags[at + 2 :])])

    def serve(self, cluster: CandidateCluster) -> str:
        """Returns the command line that serves this division and policy. The user fills in MODEL and the cache
        memory."""
        words = {
            "--prefill-workers": cluster.num_prefill,
            "--decode-workers": cluster.num_decode,
            "--placement-policy": cluster.policy,
            "--ttft-slo": f"{self.options.ttft_slo:g}",
            "--tbt-slo": f"{self.options.tbt_slo:g}",
        }
        return " ".join(["moonserve serve MODEL", *(f"{flag} {word}" for flag, word in words.items())])


def format_plan(answer: PlanReport) -> str:
    """Formats the answer for a terminal."""
    found, question = answer.plan, answer.question
    parts = [
        _headline(answer),
        f"most goodput with {question.num_machines} machines, and who came next",
        _table([found.best, *found.rivals]),
        f"{found.best.cluster.division} with smaller caches; {found.smallest_cache.cluster.dram_tokens:,} tokens per"
        " prefill machine cost hardly anything",
        _table([found.best, *found.caches]),
        *_smallest(answer),
        f"simulate it: {answer.simulate(_recommended(found))}",
        f"serve it: {answer.serve(_recommended(found))}",
    ]
    return "\n\n".join(parts)


def _recommended(found: Plan) -> CandidateCluster:
    """Returns the smallest sufficient cluster, otherwise the best one with no more cache than it needs."""
    return (found.smallest or found.smallest_cache).cluster


def _headline(answer: PlanReport) -> str:
    options = answer.options
    speed = "" if options.speedup == 1 else f" at {options.speedup:g} times its speed"
    return (
        f"{answer.trace}{speed}, {answer.num_requests:,} requests on {options.model_profile}; effective:"
        f" TTFT ≤ {options.ttft_slo:g} s and TBT ≤ {options.tbt_slo * 1000:g} ms"
    )


def _smallest(answer: PlanReport) -> list[str]:
    found, question = answer.plan, answer.question
    wanted = format_percent(question.target)
    if found.smallest is None:
        return [
            f"no cluster of {question.num_machines} machines keeps {wanted} effective; the best has"
            f" {format_percent(found.best.score.effective)}: try more --nodes"
        ]
    count = found.smallest.cluster.num_machines
    rows = [found.smallest, *([found.too_small] if found.too_small else [])]
    title = f"smallest with {wanted} effective: {count} machines"
    return [f"{title}{', and the best of one fewer' if found.too_small else ''}", _table(rows)]


def _table(rows: Sequence[Scored]) -> str:
    return text_table(_COLUMNS, list(map(_cells, rows)))


def _cells(scored: Scored) -> list[str]:
    cluster, score = scored.cluster, scored.score
    return [
        format_count(cluster.num_prefill),
        format_count(cluster.num_decode),
        cluster.policy,
        format_count(cluster.dram_tokens),
        format_percent(score.effective),
        f"{score.goodput:.2f}",
        format_percent(score.rejected),
        format_ms_as_seconds(score.mean_ttft_ms),
        format_ms_as_seconds(score.p90_ttft_ms),
        format_ms(score.p90_tbt_ms),
        format_percent(score.hit_ratio),
    ]


def to_json(answer: PlanReport) -> str:
    """Returns the answer as JSON. Equal answers give equal text; NaN and infinity become null."""
    found = answer.plan
    whole = {
        "format": PLAN_FORMAT,
        "trace": answer.trace,
        "num_requests": answer.num_requests,
        "speedup": answer.options.speedup,
        "model_profile": answer.options.model_profile,
        "slo_ttft_s": answer.options.ttft_slo,
        "slo_tbt_s": answer.options.tbt_slo,
        "num_machines": answer.question.num_machines,
        "target": answer.question.target,
        "best": _score_fields(found.best),
        "rivals": [_score_fields(each) for each in found.rivals],
        "caches": [_score_fields(each) for each in found.caches],
        "thrifty": _score_fields(found.smallest_cache),
        "smallest": _score_fields(found.smallest),
        "too_small": _score_fields(found.too_small),
        "simulate": answer.simulate(_recommended(found)),
        "serve": answer.serve(_recommended(found)),
    }
    return pydantic_core.to_json(whole, indent=2, inf_nan_mode="null").decode() + "\n"


def _score_fields(scored: Scored | None) -> dict[str, Any] | None:
    return None if scored is None else {**asdict(scored.cluster), **asdict(scored.score)}


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
    return run_command(PlanConfig, run, argv, prog="moonserve plan", positional="--trace", interrupted=INTERRUPTED)


def run(config: PlanConfig) -> int:
    """Searches, writes and prints the plan. Raises ConfigError before any simulation, except if the disk is full."""
    _check(config)
    trial = SimulationScorer.of(_options(config), config.limit, Path(config.out) / _RUNS, config.processes)
    question = PlanRequirements(
        num_machines=config.nodes,
        target=config.target,
        policies=config.policies,
        dram_tokens=trial.dram_tokens,
    )
    print(f"at most {max_simulations(question):.0f} times the whole trace, parts of it counted as such")
    found = plan(question, trial)
    answer = PlanReport(
        trace=Path(config.trace).name,
        num_requests=trial.num_requests,
        options=_options(config),
        question=question,
        plan=found,
    )
    path = Path(config.out) / _PLAN
    write_text(path, to_json(answer))
    print(f"\n{format_plan(answer)}\n\n{path}")
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
class SimulationScorer:
    """Scores clusters by simulating one trace."""

    common: SimulateConfig
    trace: TraceFile
    archive: ResultArchive
    num_requests: int
    dram_tokens: int  # largest cache of a prefill machine
    num_processes: int

    @classmethod
    def of(cls, common: SimulateConfig, limit: int | None, folder: Path, num_processes: int) -> "SimulationScorer":
        """Prepares trials. Raises ConfigError for an unusable trace, options or folder."""
        specs = [spec for _, spec in specs_of(common)]  # one per policy
        for spec in specs:
            spec.check()
        trace = TraceFile(path=Path(common.trace), limit=limit)
        num_requests = len(trace.records())
        return cls(
            common=common,
            trace=trace,
            archive=ResultArchive.of(folder, trace),
            num_requests=num_requests,
            dram_tokens=specs[0].model.dram_tokens,
            num_processes=num_processes,
        )

    def __call__(self, clusters: Sequence[CandidateCluster], share: float) -> list[Score]:
        """Returns one score per cluster, on the first `share` of the requests."""
        part = "the whole trace" if share == 1 else f"the first {share:.1%} of it"
        runs = {self._run(cluster, share): cluster for cluster in clusters}

        with ProgressBars() as progress:

            def tell(done: JobProgress) -> None:
                assert isinstance(done.work, ClusterRun)
                score = score_of(self.archive.read(done.work))
                cluster = runs[done.work]
                progress.note(
                    f"  {cluster.division} {cluster.policy}, {cluster.dram_tokens:,} tokens:"
                    f" {score.effective:.1%} effective ({done.took_s:.0f} s)"
                )
                progress.show("simulations", done.share_done, 1.0, f"{done.num_done} of {done.num_all}", done.left_s)

            with progress.busy(f"{len(clusters)} clusters on {part}"):
                run_missing(runs, self.trace, self.archive, num_processes=self.num_processes, tell=tell)
        return [score_of(self.archive.read(run)) for run in runs]

    def _run(self, cluster: CandidateCluster, share: float) -> ClusterRun:
        options = options_of(cluster, self.common)
        ((_, spec),) = specs_of(options)
        if not isinstance(spec, ClusterSpec):
            raise ConfigError("a plan is for machines of two roles")
        count = None if share == 1 else math.ceil(share * self.num_requests)
        return ClusterRun(spec=spec, speedup=options.speedup, num_requests=count)
