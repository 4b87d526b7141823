"""Which processes make up a cluster on one machine, and with which options each is started. Pure.

An option that a process's configuration shares by name with `ServeConfig` is passed on as it is; what differs from
process to process is said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conductor.config import ConductorConfig
from decode_worker.config import DecodeConfig
from deploy.config import DRAIN_S, STOP_GRACE_S, ServeConfig
from deploy.undivided.config import UndividedConfig
from deploy.worker.config import WorkerConfig
from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from prefill_worker.config import PrefillConfig
from protocol.config import Option, options_of

# The HTTP endpoint's address is the gateway's alone.
_NOT_INHERITED = {"host", "port"}

# Workers compute on all cores; who answers clients has little to do, and shall not wait for a time slice to do it.
WORKER_NICE = 10

DEMO_MODEL_NAME = "moonserve-demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to start as `python -m module flags`."""

    instance_id: str
    module: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = STOP_GRACE_S  # from SIGTERM to SIGKILL
    nice: int = 0  # as nice(1): higher gives way


def conductor_spec(config: ServeConfig, port: str = "0", number: int = 0) -> ProcessSpec:
    """A process that must be ready before the others can be told its address."""
    instance_id = "conductor" if config.conductors == 1 else f"conductor-{number}"
    return _spec(config, instance_id, "conductor", ConductorConfig, {"port": port})


def member_specs(
    config: ServeConfig,
    model_path: str,
    conductor: str,
    ledger: str | None = None,
    gpus: Sequence[str] = (),
) -> list[ProcessSpec]:
    """All other processes: store nodes, workers, gateways. `conductor`: addresses with commas between; `ledger`: file
    for the shares of a memory budget, unless the configuration names another; `gpus`: this machine's, as
    CUDA_VISIBLE_DEVICES names them."""
    shared = {"conductor": conductor}
    worker = {
        **shared,
        "model": model_path,
        "drain_timeout_s": str(DRAIN_S),
    }
    ledger = config.kv_memory_ledger or ledger
    if config.kv_memory_budget is not None and ledger is not None:
        worker |= {"kv_memory_ledger": ledger, "kv_memory_floor": str(config.memory_floor)}
    stores = [_store_spec(config, f"store-{i}", shared) for i in range(config.store_nodes)]
    dealt = _Dealt(config, gpus)
    workers = (_switching if config.role_switching == "on" else _fixed)(config, worker, dealt)
    workers = [
        replace(dealt.seen_by(index, spec), nice=WORKER_NICE) for index, spec in enumerate(workers)
    ]
    gateways = [_gateway_spec(config, i, model_path, conductor) for i in range(config.gateways)]
    return [*stores, *workers, *gateways]


class _Dealt:
    """GPUs, dealt out to workers in turn: each computes on one, whose memory its workers share evenly."""

    def __init__(self, config: ServeConfig, gpus: Sequence[str]) -> None:
        self._gpus = gpus if config.device in ("auto", "cuda") else ()
        self._config = config

    def share(self, index: int) -> dict[str, str]:
        """The option of the worker with this number."""
        num_gpus, num_workers = len(self._gpus) or 1, self._config.num_workers
        sharing = len(range(index % num_gpus, num_workers, num_gpus))
        return {"gpu_memory_utilization": f"{self._config.gpu_memory_utilization / sharing:.4g}"}

    def seen_by(self, index: int, spec: ProcessSpec) -> ProcessSpec:
        """The worker as a process that sees its own GPU only."""
        if not self._gpus:
            return spec
        own = {"CUDA_VISIBLE_DEVICES": self._gpus[index % len(self._gpus)]}
        return replace(spec, environment={**spec.environment, **own})


def _fixed(config: ServeConfig, worker: Mapping[str, str], dealt: _Dealt) -> list[ProcessSpec]:
    is_group = config.pipeline_parallel_size > 1  # whose stages have no whole blocks for a store
    homes = [{} if is_group else _home(config, i) for i in range(config.prefill_workers)]
    own = {**worker, **_ranks(config, config.tensor_parallel_sizes[0])}
    prefills = [
        _spec(
            config,
            f"prefill-{i}",
            "prefill_worker",
            PrefillConfig,
            {**own, **home, **dealt.share(i)},
        )
        for i, home in enumerate(homes)
    ]
    decodes = [
        _decode_spec(config, i, {**worker, **dealt.share(config.prefill_workers + i)})
        for i in range(config.decode_workers)
    ]
    return [*prefills, *decodes]


def _decode_spec(config: ServeConfig, index: int, worker: Mapping[str, str]) -> ProcessSpec:
    ranks = _ranks(config, config.tensor_parallel_sizes[1])
    name, values = f"decode-{index}", {**worker, **ranks, **_home(config, index)}
    if config.conditional_disaggregation == "off":
        return _spec(config, name, "decode_worker", DecodeConfig, values)
    return _spec(config, name, "deploy.undivided", UndividedConfig, values)


def _switching(config: ServeConfig, worker: Mapping[str, str], dealt: _Dealt) -> list[ProcessSpec]:
    """Names that say nothing of a role, which is only what each begins with."""
    roles = ["prefill"] * config.prefill_workers + ["decode"] * config.decode_workers
    return [
        _spec(
            config,
            f"worker-{i}",
            "deploy.worker",
            WorkerConfig,
            {
                **worker,
                **dealt.share(i),
                **_ranks(config, config.tensor_parallel_size),
                **_home(config, i),
                "role": role,
            },
        )
        for i, role in enumerate(roles)
    ]


def _gateway_spec(config: ServeConfig, index: int, model_path: str, conductor: str) -> ProcessSpec:
    names = config.served_model_name or (config.model or DEMO_MODEL_NAME,)
    values = {
        "conductor": conductor,
        "model": model_path,
        "host": config.host,
        "port": str(config.port),
        "served_model_name": ",".join(names),
    }
    spec = _spec(config, f"gateway-{index}", "gateway", GatewayConfig, values)
    return replace(spec, flags=(*spec.flags, "--reuse-port")) if config.gateways > 1 else spec


def _store_spec(config: ServeConfig, instance_id: str, values: Mapping[str, str]) -> ProcessSpec:
    spec = _spec(
        config, instance_id, "kvstore", StoreConfig, {**values, **_disk(config, instance_id)}
    )
    return replace(spec, stop_grace_s=config.store_stop_grace_s)


def _disk(config: ServeConfig, instance_id: str) -> dict[str, str]:
    """A folder belongs to one store node."""
    if config.ssd is None or config.store_nodes == 1:
        return {}
    folder, _, size = config.ssd.rpartition(":")
    return {"ssd": f"{folder.rstrip('/')}/{instance_id}:{size}"}


def _ranks(config: ServeConfig, size: int) -> dict[str, str]:
    """How a worker of so many ranks computes."""
    return {"tensor_parallel_size": str(size), "num_threads": str(config.threads_of(size))}


def _home(config: ServeConfig, index: int) -> dict[str, str]:
    """The store node beside a worker: they are dealt out in turn."""
    return {"home_store": f"store-{index % config.store_nodes}"} if config.store_nodes else {}


def _spec(
    config: ServeConfig,
    instance_id: str,
    module: str,
    config_class: type,
    values: Mapping[str, str],
) -> ProcessSpec:
    flags: list[str] = ["--instance-id", instance_id]
    environment: dict[str, str] = {}
    for option in options_of(config_class):
        if option.name in values:
            flags += [option.flag, values[option.name]]
        elif _is_shared(config, option):
            inherited = _inherited(option, getattr(config, option.name))
            if option.masked and inherited:  # process lists show flags
                environment[option.env] = inherited[-1]
            else:
                flags += inherited
    return ProcessSpec(
        instance_id=instance_id, module=module, flags=tuple(flags), environment=environment
    )


def _is_shared(config: ServeConfig, option: Option) -> bool:
    return option.name not in _NOT_INHERITED and not option.secret and hasattr(config, option.name)


def _inherited(option: Option, value: Any) -> list[str]:
    if value is None or value == ():
        return []
    if isinstance(value, bool):
        return [option.flag if value else option.negated_flag]
    if isinstance(value, tuple):
        return [option.flag, ",".join(value)]
    return [option.flag, str(value)]
