"""`moonserve profile`: how fast a model is on this machine, as coefficients with their errors and rates of moving KV.

Owns what is measured, in which order, and the file that `moonserve simulate` reads. Its rule: everything is measured as
the cluster does it: prompts in a worker's chunks, copies and connections by the transfer engine, the disk around the
page cache. Runs alone, in one process, or with `--serving` as the client of a cluster that it starts and stops, so that
what serving adds and what the processes cost each other is measured too. Changes nothing but the file it is told to
write.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conductor.cost.decode import DecodeFit, fit_decode
from conductor.cost.prefill import PrefillFit, fit_prefill
from conductor.policies import DEFAULT_POLICY
from deploy.doctor import disk_speed
from deploy.doctor.transfer_checks import try_transport
from deploy.profile import probe, report, serving
from deploy.profile.calibration import calibrated
from deploy.profile.config import ProfileConfig
from engine.config import ModelConfig, load_model_config
from engine.hub import resolve_model
from engine.pool_plan import PoolPlan, plan_pool
from engine.replica_config import ReplicaConfig
from models import demo_model_path
from protocol.config import HelpRequested, load
from protocol.errors import ConfigError
from protocol.machine import cache_folder
from protocol.process import EXIT_CONFIG
from protocol.progress import Progress, duration
from traces.simulator.profiles import write_profile
from traces.simulator.spec import ClusterSpec, Crowding, ModelProfile, Overheads
from transfer.options import TransferOptions

if TYPE_CHECKING:
    from deploy.profile.runs import Answered, PromptRun, StepRun
    from deploy.profile.terms import ServingTerms
    from engine.engine import Engine
    from engine.profile import DecodePoint, Grid, PrefillPoint

# Options that a cluster is started with.
_OF_WORKERS = (
    "dtype",
    "kv_cache_dtype",
    "load_format",
    "block_size",
    "kv_cache_memory",
    "dram",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kernels",
)

# `cpu` leaves out the time that other programs had the processor.
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """The model's steps, as measured and as fitted."""

    prefill_points: Sequence[PrefillPoint | PromptRun]
    decode_points: Sequence[DecodePoint | StepRun]
    prefill: PrefillFit
    decode: DecodeFit
    terms: ServingTerms | None = None  # with --serving, like the next
    bursts: Sequence[Sequence[Answered]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Bytes per second."""

    copy: float
    tcp: float
    disk: float


def main(argv: Sequence[str]) -> int:
    """`argv`: the arguments after `profile`; the first one may be the model."""
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0:1] = ["--model", arguments[0]]
    try:
        config = load(ProfileConfig, arguments, prog="moonserve profile", environ=dict(os.environ))
        run(config)
    except HelpRequested as request:
        print(request)
        return 0
    except ConfigError as error:
        print(f"moonserve profile: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def run(config: ProfileConfig) -> ModelProfile:
    """Measures, prints the report and writes the file if there is to be one. Raises ConfigError."""
    path = demo_model_path() if config.model is None else resolve_model(config.model)
    model = load_model_config(path)
    plan = plan_pool(_replica(config, path), model)
    with Progress() as progress:
        with progress.busy("copies, connections and the disk"):
            rates = _measure_rates(config)  # first: torch's threads are not about yet
        what = "a cluster" if config.serving else "the model's steps"
        with progress.busy(f"{what}, for about {duration(config.budget_s)}"):
            timed = (
                _measure_serving(config)
                if config.serving
                else _measure_alone(config, path, model, plan)
            )
    profile = _profile(config, path, model, plan, timed, rates)
    if config.serving:
        profile = _calibrated(config, profile, timed)
    print(f"{profile.name}, {config.num_threads} thread(s), {config.clock} time, ", end="")
    print(f"prompts in chunks of {config.max_num_batched_tokens} tokens\n")
    shown = (
        ("copy within this machine (shm)", rates.copy),
        ("tcp over loopback", rates.tcp),
        ("disk, reading", rates.disk),
    )
    print(report.as_text(timed.prefill, timed.decode, shown))
    if config.serving:
        print("", *serving.as_text(profile.overheads, profile.crowding), sep="\n")
    if config.json is not None:
        write_profile(profile, Path(config.json), measured=_measured(config, timed))
        print(f"\nwritten to {config.json}")
    return profile


def _measure_serving(config: ProfileConfig) -> _Timed:
    shape = serving.ClusterShape(
        model=None if config.model is None else resolve_model(config.model),
        num_prefill=config.prefill_workers,
        num_decode=config.decode_workers,
        num_threads=config.num_threads,
        flags=tuple(
            part
            for name in _OF_WORKERS
            for part in (f"--{name.replace('_', '-')}", str(getattr(config, name)))
        ),
    )
    terms, seen = serving.measure(
        shape,
        probe.Grid(
            load_prompt_tokens=config.load_prompt_tokens,
            load_answer_tokens=config.load_answer_tokens,
        ),
        chunk_tokens=config.max_num_batched_tokens,
        budget_s=config.budget_s,
    )
    return _Timed(
        prefill_points=seen.prompts,
        decode_points=seen.steps,
        prefill=terms.prefill,
        decode=terms.decode,
        terms=terms,
        bursts=seen.answered,
    )


def _replica(config: ProfileConfig, path: Path) -> ReplicaConfig:
    return ReplicaConfig(
        instance_id="profile",
        model=str(path),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        kv_cache_memory=config.kv_cache_memory,
    )


def _load(config: ProfileConfig, path: Path, model: ModelConfig, plan: PoolPlan) -> Engine:
    # Here, so that a wrong option is told before torch is imported.
    from engine.engine import Engine

    folder = cache_folder(os.environ, Path.home())
    return Engine.load(
        path,
        config=model,
        layout=plan.layout,
        dtype=plan.dtype,
        num_blocks=plan.num_blocks,
        num_threads=config.num_threads,
        load_format=config.load_format,
        kernels=config.kernels,
        cache_folder=folder if config.cache_dir is None else Path(config.cache_dir),
    )


def _measure_alone(config: ProfileConfig, path: Path, model: ModelConfig, plan: PoolPlan) -> _Timed:
    """Decode steps first, since they take least."""
    from engine.profile import decode_points, prefill_points

    engine = _load(config, path, model, plan)
    clock, grid = _CLOCKS[config.clock], _grid(config)
    began = clock()
    decode = decode_points(engine, grid, clock, began + config.budget_s / 2)
    prefill = prefill_points(engine, grid, clock, began + config.budget_s)
    return _Timed(
        prefill_points=prefill,
        decode_points=decode,
        prefill=fit_prefill(
            np.array([point.num_tokens for point in prefill]),
            np.array([point.num_cached for point in prefill]),
            np.array([point.seconds for point in prefill]),
        ),
        decode=fit_decode(
            np.array([point.num_seqs for point in decode]),
            np.array([point.context_tokens for point in decode]),
            np.array([point.seconds for point in decode]),
        ),
    )


def _grid(config: ProfileConfig) -> Grid:
    from engine.profile import FINE_GRID

    batches = tuple(batch for batch in FINE_GRID.batches if batch <= config.max_num_seqs)
    return replace(FINE_GRID, batches=batches, chunk_tokens=config.max_num_batched_tokens)


def _measure_rates(config: ProfileConfig) -> _Rates:
    folder = Path(config.disk) if config.disk is not None else _temporary_folder()
    return _Rates(
        copy=_transport_rate("shm"),
        tcp=_transport_rate("tcp"),
        disk=disk_speed.read_bytes_per_s(folder),
    )


def _temporary_folder() -> Path:
    return Path(os.environ.get("TMPDIR", "/var/tmp"))  # /tmp is often memory


def _transport_rate(transport: str) -> float:
    trial = try_transport(transport, TransferOptions(), measure=True)
    if trial.read_bytes_s is None:
        raise ConfigError(f"{transport}: {trial.error}; see moonserve doctor")
    return trial.read_bytes_s


def _profile(
    config: ProfileConfig,
    path: Path,
    model: ModelConfig,
    plan: PoolPlan,
    timed: _Timed,
    rates: _Rates,
) -> ModelProfile:
    token_bytes = plan.layout.block_bytes // plan.layout.block_size
    return ModelProfile(
        name=config.name or (config.model and Path(config.model).name) or path.name,
        prefill=timed.prefill.profile,
        decode=timed.decode.profile,
        kv_bytes_per_token=token_bytes,
        num_layers=model.num_layers,
        nic_bytes_per_s=rates.tcp,
        device_bytes_per_s=rates.copy,
        disk_bytes_per_s=rates.disk,
        device_tokens=plan.num_blocks * plan.layout.block_size,
        dram_tokens=config.dram // token_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        overheads=Overheads() if timed.terms is None else timed.terms.overheads,
        crowding=Crowding() if timed.terms is None else timed.terms.crowding,
    )


def _calibrated(config: ProfileConfig, profile: ModelProfile, timed: _Timed) -> ModelProfile:
    """The cluster that was measured, as the simulator knows it, and what its bursts say of it."""
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
    return calibrated(spec, timed.bursts).model


def _measured(config: ProfileConfig, timed: _Timed) -> dict[str, Any]:
    """What the coefficients rest on; readers may ignore it."""
    return {
        "clock": config.clock,
        "num_threads": config.num_threads,
        "chunk_tokens": config.max_num_batched_tokens,
        "prefill_errors": asdict(timed.prefill.errors),
        "decode_errors": asdict(timed.decode.errors),
        "prefill_points": [asdict(point) for point in timed.prefill_points],
        "decode_points": [asdict(point) for point in timed.decode_points],
    }
