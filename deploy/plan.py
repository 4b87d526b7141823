"""Which processes make up a cluster, and with which options each is started. Pure.

An option that a process's configuration shares by name with `ServeConfig` is passed on as it is; what differs from
process to process is said here. `conductor_spec` and `member_specs` are a cluster on one machine; launchers that place
processes themselves (`deploy.ray`) ask for one at a time, for the `Site` where it will run. Knows neither how a process
is started nor by whom.
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
from kvstore.directory.config import DirectoryConfig
from prefill_worker.config import PrefillConfig
from protocol.config import Option, options_of
from protocol.ids import Role

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
    fds: tuple[int, ...] = ()  # descriptors of ours that it has, too
    overlaps: bool = False  # two of it serve side by side while one gives way to the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What processes are told of the place where they run."""

    conductor: str  # addresses with commas between
    model_path: str = ""  # the model's folder there, for workers and gateways
    host: str | None = None  # address to listen on and to publish; None = loopback
    ledger: str | None = None  # file for the shares of the host's memory budget
    drain_s: float = DRAIN_S  # that what is under way gets to finish

    @property
    def stop_grace_s(self) -> float:
        """From SIGTERM to SIGKILL: what follows a drain takes its time, too."""
        return self.drain_s + STOP_GRACE_S - DRAIN_S

    @property
    def listening(self) -> dict[str, str]:
        return {} if self.host is None else {"host": self.host}


def conductor_spec(
    config: ServeConfig, port: str = "0", number: int = 0, site: Site | None = None
) -> ProcessSpec:
    """A process that must be ready before the others can be told its address, unless `port` says it."""
    instance_id = "conductor" if config.conductors == 1 else f"conductor-{number}"
    listening = {} if site is None else site.listening
    return _spec(config, instance_id, "conductor", ConductorConfig, {"port": port, **listening})


def member_specs(
    config: ServeConfig,
    model_path: str,
    conductor: str,
    ledger: str | None = None,
    gpus: Sequence[str] = (),
    listener: int | None = None,
) -> list[ProcessSpec]:
    """All other processes: store nodes, workers, gateways. `conductor`: addresses with commas between; `ledger`: file
    for the shares of a memory budget, unless the configuration names another; `gpus`: this machine's, as
    CUDA_VISIBLE_DEVICES names them; `listener`: as of `deploy.port.HeldPort`."""
    site = Site(conductor=conductor, model_path=model_path, ledger=ledger)
    stores = [store_spec(config, site, f"store-{i}") for i in range(config.store_nodes)]
    dealt = _Dealt(config, gpus)
    workers = [
        dealt.seen_by(
            index,
            worker_spec(
                config, site, name, role, home=_home(config, turn), share=dealt.share(index)
            ),
        )
        for index, (name, role, turn) in enumerate(_workers(config))
    ]
    gateways = [
        gateway_spec(config, site, f"gateway-{i}", listener) for i in range(config.gateways)
    ]
    return [*stores, *workers, *gateways]


class _Dealt:
    """GPUs, dealt out to workers in turn: each computes on one, whose memory its workers share evenly."""

    def __init__(self, config: ServeConfig, gpus: Sequence[str]) -> None:
        self._gpus = gpus if config.device in ("auto", "cuda") else ()
        self._config = config

    def share(self, index: int) -> float:
        """Of its GPU's memory, for the worker with this number."""
        num_gpus, num_workers = len(self._gpus) or 1, self._config.num_workers
        sharing = len(range(index % num_gpus, num_workers, num_gpus))
        return self._config.gpu_memory_utilization / sharing

    def seen_by(self, index: int, spec: ProcessSpec) -> ProcessSpec:
        """The worker as a process that sees its own GPU only."""
        if not self._gpus:
            return spec
        own = {"CUDA_VISIBLE_DEVICES": self._gpus[index % len(self._gpus)]}
        return replace(spec, environment={**spec.environment, **own})


def _workers(config: ServeConfig) -> list[tuple[str, Role, int]]:
    """Name, role and turn at the store nodes of each; names of those that may change say nothing of a role, which is
    only what each begins with."""
    prefills = [(f"prefill-{i}", Role.PREFILL, i) for i in range(config.prefill_workers)]
    decodes = [(f"decode-{i}", Role.DECODE, i) for i in range(config.decode_workers)]
    if config.role_switching == "off":
        return prefills + decodes
    return [(f"worker-{i}", role, i) for i, (_, role, _) in enumerate(prefills + decodes)]


def worker_spec(
    config: ServeConfig,
    site: Site,
    instance_id: str,
    role: Role,
    *,
    home: str | None = None,
    share: float | None = None,
) -> ProcessSpec:
    """`home`: the store node beside it; `share`: of its GPU's memory, where that is not what the configuration says."""
    values = {
        **site.listening,
        "conductor": site.conductor,
        "model": site.model_path,
        "drain_timeout_s": str(site.drain_s),
        **_memory(config, site),
        **_ranks(config, config.tensor_parallel_sizes[0 if role is Role.PREFILL else 1]),
    }
    is_group = role is Role.PREFILL and config.pipeline_parallel_size > 1
    if home is not None and not is_group:  # whose stages have no whole blocks for a store
        values["home_store"] = home
    if share is not None:
        values["gpu_memory_utilization"] = f"{share:.4g}"
    module, config_class = _WORKERS[role, config.conditional_disaggregation]
    if config.role_switching == "on":
        module, config_class = "deploy.worker", WorkerConfig
        values["role"] = role.value
    spec = _spec(config, instance_id, module, config_class, values)
    return replace(spec, nice=WORKER_NICE, stop_grace_s=site.stop_grace_s)


# By role and by --conditional-disaggregation.
_WORKERS: dict[tuple[Role, str], tuple[str, type]] = {
    (Role.PREFILL, "off"): ("prefill_worker", PrefillConfig),
    (Role.PREFILL, "on"): ("prefill_worker", PrefillConfig),
    (Role.DECODE, "off"): ("decode_worker", DecodeConfig),
    (Role.DECODE, "on"): ("deploy.undivided", UndividedConfig),
}


def gateway_spec(
    config: ServeConfig, site: Site, instance_id: str, listener: int | None = None
) -> ProcessSpec:
    """Its address is the endpoint's, wherever it runs. `listener`: as of `deploy.port.HeldPort`."""
    names = config.served_model_name or (config.model or DEMO_MODEL_NAME,)
    values = {
        "conductor": site.conductor,
        "model": site.model_path,
        "host": config.host,
        "port": str(config.port),
        "served_model_name": ",".join(names),
        "drain_s": str(site.drain_s),
    }
    spec = _spec(config, instance_id, "gateway", GatewayConfig, values)
    spec = replace(spec, stop_grace_s=site.stop_grace_s)
    if listener is not None:
        flags = (*spec.flags, "--listen-fd", str(listener))
        return replace(spec, flags=flags, fds=(listener,), overlaps=True)
    if config.gateways > 1:
        return replace(spec, flags=(*spec.flags, "--reuse-port"), overlaps=True)
    return spec


def store_spec(config: ServeConfig, site: Site, instance_id: str) -> ProcessSpec:
    """A node with memory, and the part of the disk that is its own."""
    values = {**site.listening, "conductor": site.conductor, **_disk(config, instance_id)}
    spec = _spec(config, instance_id, "kvstore", StoreConfig, values)
    return replace(spec, stop_grace_s=config.store_stop_grace_s)


def directory_spec(config: ServeConfig, site: Site, port: int) -> ProcessSpec:
    """The embedded registry of a cluster without a Redis, at a port that others are told beforehand."""
    values = {**site.listening, "port": str(port), "registry": None}
    return _spec(config, "directory", "kvstore.directory", DirectoryConfig, values)


def _memory(config: ServeConfig, site: Site) -> dict[str, str]:
    """What workers of one host that share a budget are told."""
    ledger = config.kv_memory_ledger or site.ledger
    if config.kv_memory_budget is None or ledger is None:
        return {}
    return {"kv_memory_ledger": ledger, "kv_memory_floor": str(config.memory_floor)}


def _disk(config: ServeConfig, instance_id: str) -> dict[str, str]:
    """A folder belongs to one store node."""
    if config.ssd is None or config.store_nodes == 1:
        return {}
    folder, _, size = config.ssd.rpartition(":")
    return {"ssd": f"{folder.rstrip('/')}/{instance_id}:{size}"}


def _ranks(config: ServeConfig, size: int) -> dict[str, str]:
    """How a worker of so many ranks computes."""
    return {"tensor_parallel_size": str(size), "num_threads": str(config.threads_of(size))}


def _home(config: ServeConfig, turn: int) -> str | None:
    """The store node beside a worker: they are dealt out in turn."""
    return f"store-{turn % config.store_nodes}" if config.store_nodes else None


def _spec(
    config: ServeConfig,
    instance_id: str,
    module: str,
    config_class: type,
    values: Mapping[str, str | None],
) -> ProcessSpec:
    """`values`: options of its own; None = as if nobody had said anything, whatever the configuration says."""
    flags: list[str] = ["--instance-id", instance_id]
    environment: dict[str, str] = {}
    for option in options_of(config_class):
        if option.name in values:
            own = values[option.name]
            flags += [] if own is None else [option.flag, own]
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
