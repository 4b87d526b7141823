"""`moonserve simulate TRACE`: runs one or several clusters in virtual time. Prints a table, writes a report folder."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moonserve.conductor.placement.admission import AdmissionMode
from moonserve.conductor.placement.policies import POLICY_CHOICES, PUBLISHED_POLICY, make_policy
from moonserve.conductor.placement.tenant_fairness import parse_weights
from moonserve.conductor.role_switching import RoleThresholds
from moonserve.kvstore.state.eviction import DEFAULT_POLICY as DEFAULT_EVICTION
from moonserve.kvstore.state.eviction import POLICY_NAMES as EVICTION_NAMES
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.traces.format import TOKENS_PER_HASH, read_trace
from moonserve.traces.output import explain_write_errors
from moonserve.traces.simulation_report import write_page
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800, PROFILES, read_profile
from moonserve.traces.simulator.results import format_summary
from moonserve.traces.simulator.spec import ADMISSIONS, ClusterSpec, CoupledSpec, Fault, ModelProfile

_BITS = 8
_FAULT = re.compile(r"(?P<instance>[\w-]+)@(?P<at>[\d.]+)(\+(?P<for>[\d.]+))?(?P<silent>:silent)?")
_COUPLED = {
    "plain": {},
    "caching": {"prefix_caching": True},
    "chunked": {"chunked_prefill": True},
    "chunked-caching": {"prefix_caching": True, "chunked_prefill": True},
}


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Options of `moonserve simulate`. `policy` and `coupled` may name several; each is a separate run."""

    trace: str = option(help="trace file, JSON lines; also as the first argument")
    limit: int | None = option(None, help="only this many requests, the first ones")
    speedup: float = option(1.0, help="factor on the trace's clock")
    prefill: int = option(8, help="prefill machines (or groups, see --prefill-group)")
    decode: int = option(8, help="decode machines")
    model_profile: str = option(
        LLAMA3_70B_8XA800.name,
        help=f"{', '.join(PROFILES)}, or a file that moonserve profile --json wrote",
    )
    policy: tuple[str, ...] = option((PUBLISHED_POLICY,), help=f"placement, commas between: {POLICY_CHOICES}")
    balancing_threshold: float = option(
        1.25, help="fetch a prefix when the best in the cluster is this many times longer"
    )
    admission: str = option(
        AdmissionMode.PREDICTED.value,
        help="which predictions reject requests; late: of the decode load only once it is computed",
        choices=ADMISSIONS,
    )
    tenant_weights: tuple[str, ...] = option(
        (), help="shares of the trace's tenants, as alice=2,bob=0.5; 1 where not given"
    )
    scheduling_policy: str = option("fcfs", help="order of a prefill machine's queue", choices=("fcfs", "priority"))
    eviction: str = option(DEFAULT_EVICTION, help="what leaves a machine's memory first", choices=EVICTION_NAMES)
    pool: str = option("global", help="whether prefixes are read from other machines", choices=("global", "local"))
    ttft_slo: float = option(30.0, help="objective for the first token, seconds")
    tbt_slo: float = option(0.1, help="objective between tokens, seconds")
    block_size: int = option(TOKENS_PER_HASH, help="tokens per block, and per hash id of the trace")
    chunk_tokens: int = option(8192, help="prompt tokens computed at once")
    prefill_group: int = option(1, help="machines that prefill one prompt together")
    heartbeat_interval_s: float = option(1.0, help="how often machines report, seconds")
    nic_gbit: float | None = option(None, help="a machine's network, Gbit/s; the profile's if not given")
    dram_tokens: int | None = option(None, help="of KV in a machine's part of the pool, likewise")
    disk_tokens: int | None = option(None, help="of KV on a machine's disk, likewise")
    faults: tuple[str, ...] = option((), help="INSTANCE@SECONDS[+SECONDS][:silent], commas between: prefill-3@600+60")
    role_switching: str = option(
        "off",
        help="whether machines change between prefill and decode as load demands; both = a run of each",
        choices=("off", "on", "both"),
    )
    conditional_disaggregation: str = option(
        "off",
        help="whether decode machines prefill prompts themselves where that is sooner; both = a run of each",
        choices=("off", "on", "both"),
    )
    coupled: tuple[str, ...] = option((), help=f"baselines beside it, on as many machines: {', '.join(_COUPLED)}")
    seed: int = option(0, help="of the random policy")
    report: str | None = option(None, help="folder for index.html and results.json")


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, the arguments after `simulate`. The first one may be the trace."""
    return run_command(SimulateConfig, run, argv, prog="moonserve simulate", positional="--trace")


def run(config: SimulateConfig) -> int:
    """Simulates and reports. Raises ConfigError for invalid options before any simulation runs."""
    if config.speedup <= 0 or (config.limit is not None and config.limit < 1):
        raise ConfigError("--speedup must be above 0 and --limit at least 1")
    specs = list(specs_of(config))
    for _, spec in specs:
        spec.check()
    if config.report is not None:
        with explain_write_errors(f"to --report {config.report}"):  # fails now, not after minutes of computing
            Path(config.report).mkdir(parents=True, exist_ok=True)
    results = []
    with ProgressBars() as progress:
        with progress.busy(f"reading {config.trace}"):
            records = [each.scaled(1.0, 1.0, config.speedup) for each in read_trace(Path(config.trace), config.limit)]
        for number, (name, spec) in enumerate(specs, start=1):
            task = f"{name} ({number} of {len(specs)})"

            def show(num_ended: int, task: str = task) -> None:
                text = f"{num_ended:,} of {len(records):,} requests"
                progress.show(task, num_ended, len(records), text)

            show(0)
            results.append(simulate(spec, records, name=name, progress=show))
            show(len(records))
    print(format_summary(results))
    if config.report is not None:
        with ProgressBars() as progress, progress.busy(f"writing {config.report}"):
            page = write_page(results, config.report)
        print(page)
    return 0


def specs_of(config: SimulateConfig) -> Iterator[tuple[str, ClusterSpec | CoupledSpec]]:
    """Yields the specs to simulate, with the names under which they are reported."""
    model = _model(config)
    common = ClusterSpec(
        model=model,
        num_prefill=config.prefill,
        num_decode=config.decode,
        balancing_threshold=config.balancing_threshold,
        admission=config.admission,
        tenant_weights=tuple(parse_weights(config.tenant_weights).items()),
        scheduling_policy=config.scheduling_policy,
        eviction=config.eviction,
        ttft_slo_s=config.ttft_slo,
        tbt_slo_s=config.tbt_slo,
        block_size=config.block_size,
        heartbeat_interval_s=config.heartbeat_interval_s,
        prefill_group=config.prefill_group,
        chunk_tokens=config.chunk_tokens,
        pool=config.pool,
        seed=config.seed,
        faults=tuple(map(parse_fault, config.faults)),
    )
    for policy in config.policy:
        shown = make_policy(policy, config.balancing_threshold, config.seed).name
        yield from _variants(config, shown, replace(common, policy=policy))
    for kind in config.coupled:
        if kind not in _COUPLED:
            raise ConfigError(f"--coupled is {kind!r}; it is one of {', '.join(_COUPLED)}")
        yield (
            f"coupled {kind}",
            CoupledSpec(
                model=model,
                num_instances=config.prefill * config.prefill_group + config.decode,
                ttft_slo_s=config.ttft_slo,
                tbt_slo_s=config.tbt_slo,
                block_size=config.block_size,
                **_COUPLED[kind],
            ),
        )


def _variants(config: SimulateConfig, name: str, spec: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    """Yields the requested variants of a spec: fixed roles, decode machines that also prefill, role switching."""
    if config.role_switching != "on" and config.conditional_disaggregation != "on":
        yield name, spec
    if config.conditional_disaggregation != "off":
        yield f"{name} +conditional", replace(spec, conditional=True)
    if config.role_switching != "off":
        yield f"{name} +roles", replace(spec, roles=RoleThresholds())


def _model(config: SimulateConfig) -> ModelProfile:
    """Returns the model profile with overrides. Raises ConfigError if it is neither known nor a valid file."""
    name = config.model_profile
    if name in PROFILES:
        model = PROFILES[name]
    elif Path(name).suffix:
        model = read_profile(Path(name))
    else:
        known = ", ".join(PROFILES)
        raise ConfigError(f"--model-profile is {name!r}; it is a .json file or one of {known}")
    if config.nic_gbit is not None:
        model = replace(model, nic_bytes_per_s=config.nic_gbit * 1e9 / _BITS)
    if config.dram_tokens is not None:
        model = replace(model, dram_tokens=config.dram_tokens)
    if config.disk_tokens is not None:
        model = replace(model, disk_tokens=config.disk_tokens)
    if model.nic_bytes_per_s <= 0 or min(model.dram_tokens, model.disk_tokens) < 0:
        raise ConfigError("--nic-gbit must be above 0, --dram-tokens and --disk-tokens at least 0")
    return model


def parse_fault(text: str) -> Fault:
    """Parses one fault. Raises ConfigError if the text is invalid."""
    match = _FAULT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        return Fault(
            instance=match["instance"],
            at_s=float(match["at"]),
            for_s=None if match["for"] is None else float(match["for"]),
            silent=match["silent"] is not None,
        )
    except ValueError:
        raise ConfigError(
            f"--faults has {text!r}; one is INSTANCE@SECONDS[+SECONDS][:silent], as prefill-3@600+60"
        ) from None
