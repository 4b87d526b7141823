"""`moonserve plan TRACE`: the cluster that a trace needs, as a table, as JSON, and as command lines.

A cluster is described to the simulator by the options of `moonserve simulate`, and the command line that is printed is
made from the same options: whoever runs it sees the figures of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conductor.policies import DEFAULT_POLICY, POLICY_CHOICES, PUBLISHED_POLICY
from protocol.config import option, run_command
from protocol.errors import ConfigError
from traces.output import write_text
from traces.planner.answer import Answer, format_answer, to_json
from traces.planner.search import Question, bound, plan
from traces.planner.trial import Trial
from traces.simulator.command import SimulateConfig
from traces.simulator.many import INTERRUPTED
from traces.simulator.profiles import LLAMA3_70B_8XA800, PROFILES
from traces.simulator.spec import ADMISSIONS

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
    target: float = option(
        0.9, help="share of requests that must keep both, for the smallest cluster"
    )
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
    admission: str = option(
        SimulateConfig.admission, help="as in moonserve simulate", choices=ADMISSIONS
    )
    speedup: float = option(1.0, help="factor on the trace's clock: what if there were more users?")
    limit: int | None = option(None, help="only this many requests, the first ones")
    processes: int = option(2, help="simulations at once")
    out: str = option("out/plan", help="folder for plan.json and the simulations")


def main(argv: Sequence[str]) -> int:
    """`argv`: the arguments after `plan`; the first one may be the trace. 1: no cluster met the target."""
    return run_command(
        PlanConfig, run, argv, prog=PROG, positional="--trace", interrupted=INTERRUPTED
    )


def run(config: PlanConfig) -> int:
    """Raises ConfigError before anything is simulated, but for a full disk."""
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
    """What all clusters have in common, as the simulator's options."""
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
