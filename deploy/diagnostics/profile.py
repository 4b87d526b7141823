"""`moonserve profile`: measures a model's speed here, as coefficients with their errors, and the rates of moving KV.

Everything is measured as the cluster does it: prompts in a worker's chunks, copies and connections by the transfer
engine, disk reads without the page cache. The command runs in one process, or with `--serving` as the client of a
cluster that it starts and stops. With `--serving` it also measures the overhead of serving and how much the processes
slow each other down. It changes nothing but the file that `moonserve simulate` reads.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moonserve.conductor.placement.policies import DEFAULT_POLICY
from moonserve.conductor.prediction.compute_time import DecodeFit, ErrorReport, PrefillFit, fit_decode, fit_prefill
from moonserve.deploy.diagnostics import profile_cluster, profile_probe
from moonserve.deploy.diagnostics.doctor_network import try_transport
from moonserve.deploy.diagnostics.doctor_services import read_bytes_per_s
from moonserve.deploy.diagnostics.profile_cluster import ModelSize, fit_turnover
from moonserve.deploy.diagnostics.profile_fit import ServingTerms
from moonserve.deploy.terminal import rate
from moonserve.engine.config import FormatConfig, ReplicaConfig
from moonserve.engine.kv_cache.pool_size import plan_pool
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.model_folder import resolve_model
from moonserve.models import demo_model_path
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, require_at_least_1, run_command
from moonserve.protocol.process.machine import cache_folder
from moonserve.protocol.process.progress_bars import ProgressBars, duration
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.simulator.model_profiles import write_profile
from moonserve.traces.simulator.spec import ClusterSpec, ModelProfile
from moonserve.transfer.config import TransferOptions

if TYPE_CHECKING:
    from moonserve.deploy.diagnostics.profile_fit import Burst, PromptRun, StepRun
    from moonserve.engine.speed_profile import DecodePoint, PrefillPoint

# -- the report, as text for people

_FORMULAE = {
    "prefill": "t(n, p) = c0 + c1·(n−p) + c2·(n²−p²) seconds for n prompt tokens, p of them cached",
    "decode": "t(b, c) = c0 + c1·b + c2·c seconds for a step of b sequences with c tokens of context in all",
}
_ARGUMENTS = {"prefill": ("n", "p"), "decode": ("b", "c")}


def coefficients_text(prefill: PrefillFit, decode: DecodeFit, rates: Mapping[str, float]) -> str:
    """Returns the report. `rates`: bytes per second by name of the measured path."""
    width = max(map(len, rates))
    lines = [
        *_FORMULAE.values(),
        "",
        f"{'':8}{'c0':>12}{'c1':>12}{'c2':>12}{'points':>8}{'p50':>8}{'p90':>8}{'max':>8}",
        _row("prefill", prefill.profile, prefill.errors),
        _row("decode", decode.profile, decode.errors),
        "",
        *_worst("prefill", prefill.errors),
        *_worst("decode", decode.errors),
        "",
        *(f"{name:{width}}  {rate(bytes_s)}" for name, bytes_s in rates.items()),
    ]
    return "\n".join(lines)


def _row(name: str, profile: PrefillProfile | DecodeProfile, errors: ErrorReport) -> str:
    coefficients = "".join(f"{c:12.3e}" for c in (profile.c0, profile.c1, profile.c2))
    shares = "".join(f"{share:8.1%}" for share in (errors.p50, errors.p90, errors.max))
    return f"{name:8}{coefficients}{errors.num_points:8}{shares}"


def _worst(name: str, errors: ErrorReport) -> Iterator[str]:
    first, second = _ARGUMENTS[name]
    yield f"{name}, worst:{first:>6}{second:>9}{'measured':>13}{'predicted':>13}{'error':>9}"
    for one in errors.worst:
        times = f"{one.measured_s * 1e3:10.2f} ms{one.predicted_s * 1e3:10.2f} ms"
        yield f"{'':{len(name) + 8}}{one.at[0]:>5}{one.at[1]:>9}{times}{one.relative:+9.1%}"


# -- the command

MIB = 2**20
_KEPT = 0.875  # of a store's memory, on average: eviction begins at 0.90 and ends at 0.85 (`kvstore.config`)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(FormatConfig):
    """Options of `moonserve profile`. Options that a worker has too have the same meaning."""

    model: str | None = option(None, help="local model folder, .gguf file or hub name; the demo model when not given")
    json: str | None = option(None, help="file for the profile, as moonserve simulate reads it")
    name: str | None = option(None, help="name of the profile; the model's when not given")
    kv_cache_memory: int = option(256 * MIB, help="bytes of KV of a worker", unit="bytes")
    dram: int = option(512 * MIB, help="bytes of KV of a store node", unit="bytes")
    max_num_seqs: int = option(64, help="sequences in one decode batch")
    max_num_batched_tokens: int = option(512, help="tokens of prompt computed in one step")
    num_threads: int = option(1, help="compute threads")
    cache_dir: str | None = option(None, help="folder that keeps compiled kernels; ~/.cache/moonserve when not given")
    disk: str | None = option(None, help="folder whose disk is measured; that of temporary files when not given")
    budget_s: float = option(120.0, help="seconds for the model's steps; more make longer prompts")
    clock: str = option(
        "wall",
        help="cpu = the process's own time, on a machine that is busy with other things",
        choices=("wall", "cpu"),
    )
    serving: bool = option(False, help="measure through a cluster on this machine, including the overhead of serving")
    engine: str = option(
        "moonserve",
        help="with --serving: its workers' engine, as for moonserve serve; vllm may need MOONSERVE_VLLM_PYTHON",
        choices=("moonserve", "vllm"),
    )
    vllm: tuple[str, ...] = option(
        (), help="with --engine vllm: an engine option of vLLM's, as --vllm.enforce-eager", passed_on=True
    )
    prefill_workers: int = option(1, help="with --serving: its prefill workers")
    decode_workers: int = option(1, help="with --serving: its decode workers")
    load_prompt_tokens: int = option(512, help="with --serving: mean length of the expected prompts")
    load_answer_tokens: int = option(64, help="with --serving: mean length of the expected answers")

    def __post_init__(self) -> None:
        require_at_least_1(
            self,
            *("block_size", "max_num_seqs", "max_num_batched_tokens", "num_threads"),
            *("prefill_workers", "decode_workers", "load_prompt_tokens", "load_answer_tokens"),
        )
        if self.serving and self.clock != "wall":
            raise ConfigError("--serving measures as a client: it needs --clock wall")
        if self.engine == "vllm" and not self.serving:
            raise ConfigError("--engine vllm needs --serving")
        if self.vllm and self.engine != "vllm":
            raise ConfigError("--vllm.NAME needs --engine vllm")
        if not self.budget_s > 0:
            raise ConfigError("--budget-s must be above 0")
        if self.clock == "cpu" and self.num_threads > 1:
            raise ConfigError("--clock cpu adds up all threads: it needs --num-threads 1")


# Options that are passed to the cluster: by both engines' names, by those of the own engine, and of vLLM.
_OF_CLUSTER = ("dtype", "kv_cache_memory", "dram")
_OF_ENGINES = ("load_format", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype")
_OF_OWN_ENGINE = ("kernels", "quantize")

# `cpu` excludes the time in which other programs had the processor.
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """Measured and fitted steps of the model."""

    prefill_points: "Sequence[PrefillPoint | PromptRun]"
    decode_points: "Sequence[DecodePoint | StepRun]"
    terms: ServingTerms  # overheads and crowding only with --serving, like the bursts
    size: ModelSize
    bursts: "Sequence[Burst]" = ()


def main(argv: Sequence[str]) -> int:
    """Runs the command. `argv`: the arguments after `profile`; the first one may be the model."""

    def measured(config: ProfileConfig) -> int:
        run(config)
        return 0

    return run_command(ProfileConfig, measured, argv, prog="moonserve profile", positional="--model")


def run(config: ProfileConfig) -> ModelProfile:
    """Measures, prints the report and writes the file if `--json` names one. Raises ConfigError."""
    path = demo_model_path() if config.model is None else resolve_model(config.model)
    disk = config.disk or os.environ.get("TMPDIR", "/var/tmp")  # /tmp is often memory
    with ProgressBars() as progress:
        with progress.busy("copies, connections and the disk"):  # before torch starts its threads
            rates = {
                "copy within this machine (shm)": _transport_rate("shm"),
                "tcp over loopback": _transport_rate("tcp"),
                "disk, reading": read_bytes_per_s(Path(disk)),
            }
        what = "a cluster" if config.serving else "the model's steps"
        with progress.busy(f"{what}, for about {duration(config.budget_s)}"):
            timed = _measure_serving(config) if config.serving else _measure_alone(config, path)
    profile = _profile(config, path, timed, list(rates.values()))
    if config.serving:
        profile = _calibrated(config, profile, timed)
    print(f"{profile.name}, {config.num_threads} thread(s), {config.clock} time, ", end="")
    print(f"prompts in chunks of {config.max_num_batched_tokens} tokens\n")
    print(coefficients_text(timed.terms.prefill, timed.terms.decode, rates))
    if config.serving:
        print("", *profile_cluster.overheads_text(profile.overheads, profile.crowding), sep="\n")
    if config.json is not None:
        write_profile(profile, Path(config.json), measured=_measured(config, timed))
        print(f"\nwritten to {config.json}")
    return profile


def _measure_serving(config: ProfileConfig) -> _Timed:
    shape = profile_cluster.ClusterShape(
        model=None if config.model is None else resolve_model(config.model),
        num_prefill=config.prefill_workers,
        num_decode=config.decode_workers,
        num_threads=config.num_threads,
        flags=tuple(_serve_flags(config)),
    )
    terms, seen, size = profile_cluster.measure(
        shape,
        profile_probe.Grid(load_prompt_tokens=config.load_prompt_tokens, load_answer_tokens=config.load_answer_tokens),
        chunk_tokens=config.max_num_batched_tokens,
        budget_s=config.budget_s,
    )
    return _Timed(prefill_points=seen.prompts, decode_points=seen.steps, terms=terms, size=size, bursts=seen.bursts)


def _serve_flags(config: ProfileConfig) -> Iterator[str]:
    """Yields the flags of `moonserve serve`."""

    def flags(prefix: str, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield f"--{prefix}{name.replace('_', '-')}={getattr(config, name)}"

    yield from flags("", _OF_CLUSTER)
    if config.engine == "moonserve":
        yield from flags("", _OF_ENGINES + _OF_OWN_ENGINE)
        return
    yield "--engine=vllm"
    yield from flags("vllm.", _OF_ENGINES)
    yield from (f"--vllm.{item}" for item in config.vllm)


def _measure_alone(config: ProfileConfig, path: Path) -> _Timed:
    """Measures the engine in this process. Decode steps are first, because they take the least time."""
    # Imported here, so that a wrong option is reported before torch is imported.
    from moonserve.engine.engine import Engine
    from moonserve.engine.speed_profile import FINE_GRID, decode_points, prefill_points

    model = load_model_config(path)
    replica = ReplicaConfig(
        instance_id="profile",
        model=str(path),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        kv_cache_memory=config.kv_cache_memory,
    )
    plan = plan_pool(replica, model)
    folder = cache_folder(os.environ, Path.home())
    engine = Engine.load(
        path,
        config=model,
        layout=plan.layout,
        dtype=plan.dtype,
        num_blocks=plan.num_blocks,
        num_threads=config.num_threads,
        load_format=config.load_format,
        quantise=config.quantize,
        kernels=config.kernels,
        cache_folder=folder if config.cache_dir is None else Path(config.cache_dir),
    )
    batches = tuple(batch for batch in FINE_GRID.batches if batch <= config.max_num_seqs)
    grid = replace(FINE_GRID, batches=batches, chunk_tokens=config.max_num_batched_tokens)
    clock = _CLOCKS[config.clock]
    began = clock()
    decode = decode_points(engine, grid, clock, began + config.budget_s / 2)
    prefill = prefill_points(engine, grid, clock, began + config.budget_s)
    return _Timed(
        prefill_points=prefill,
        decode_points=decode,
        terms=ServingTerms(
            prefill=fit_prefill(*_columns(prefill, "num_tokens", "num_cached", "seconds")),
            decode=fit_decode(*_columns(decode, "num_seqs", "context_tokens", "seconds")),
        ),
        size=ModelSize(
            num_layers=model.num_layers,
            token_bytes=plan.layout.block_bytes // plan.layout.block_size,
            device_tokens=plan.num_blocks * plan.layout.block_size,
            max_model_len=plan.max_model_len,
        ),
    )


def _columns(points: Sequence[Any], *names: str) -> list[Any]:
    return [np.array([getattr(point, name) for point in points]) for name in names]


def _transport_rate(transport: str) -> float:
    trial = try_transport(transport, TransferOptions(), measure=True)
    if trial.read_bytes_s is None:
        raise ConfigError(f"{transport}: {trial.error}; see moonserve doctor")
    return trial.read_bytes_s


def _profile(config: ProfileConfig, path: Path, timed: _Timed, rates: Sequence[float]) -> ModelProfile:
    """Returns the profile. `rates`: bytes per second of copies, connections and the disk."""
    copy, tcp, disk = rates
    return ModelProfile(
        name=config.name or (config.model and Path(config.model).name) or path.name,
        prefill=timed.terms.prefill.profile,
        decode=timed.terms.decode.profile,
        kv_bytes_per_token=timed.size.token_bytes,
        num_layers=timed.size.num_layers,
        nic_bytes_per_s=tcp,
        device_bytes_per_s=copy,
        disk_bytes_per_s=disk,
        device_tokens=timed.size.device_tokens,
        dram_tokens=round(_KEPT * config.dram / timed.size.token_bytes),
        max_num_seqs=config.max_num_seqs,
        max_model_len=timed.size.max_model_len,
        fills_steps=config.engine == "vllm",
        overheads=timed.terms.overheads,
        crowding=timed.terms.crowding,
    )


def _calibrated(config: ProfileConfig, profile: ModelProfile, timed: _Timed) -> ModelProfile:
    """Returns the profile with the turnover for which a simulation of the measured cluster matches its bursts."""
    spec = ClusterSpec(
        model=profile,
        num_prefill=config.prefill_workers,
        num_decode=config.decode_workers,
        policy=DEFAULT_POLICY,
        admission="none",
        block_size=config.block_size,
        chunk_tokens=config.max_num_batched_tokens,
        mixes_prompts=True,
    )
    return fit_turnover(spec, timed.bursts).model


def _measured(config: ProfileConfig, timed: _Timed) -> dict[str, Any]:
    """Returns the measurements behind the coefficients. Readers of the file may ignore them."""
    return {
        "clock": config.clock,
        "num_threads": config.num_threads,
        "chunk_tokens": config.max_num_batched_tokens,
        "prefill_errors": asdict(timed.terms.prefill.errors),
        "decode_errors": asdict(timed.terms.decode.errors),
        "prefill_points": [asdict(point) for point in timed.prefill_points],
        "decode_points": [asdict(point) for point in timed.decode_points],
    }
