"""Plans the processes of a cluster and the options that each is started with. Pure.

An option that a process's configuration shares by name with `ServeConfig` is passed on unchanged. Options that differ
between processes are set here. `conductor_spec` and `member_specs` describe a cluster on one machine. Launchers that
place processes themselves (`deploy.ray`) request one spec at a time, for the `HostOptions` where the process will run.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from moonserve.conductor.config import ConductorConfig
from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.local_prefill.worker import LocalPrefillConfig
from moonserve.decode_worker.role_switching import RoleSwitchingConfig
from moonserve.deploy.launcher import vllm_workers
from moonserve.deploy.launcher.config import DRAIN_S, STOP_GRACE_S, ServeConfig
from moonserve.gateway.config import GatewayConfig
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.directory.config import DirectoryConfig
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.protocol.process.config import flags_of, options_of
from moonserve.protocol.request import Role
from moonserve.vllm.serving.config import VllmConfig

# The address of the HTTP endpoint is only for gateways.
_NOT_INHERITED = {"host", "port"}

DEMO_MODEL_NAME = "moonserve-demo"


class ProcessKind(StrEnum):
    """Kind of process. Members are in start order; processes stop in reverse order. A worker that can change roles has
    the kind of its first role."""

    DIRECTORY = "directory"
    CONDUCTOR = "conductor"
    STORE = "store"
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


ROLES = {ProcessKind.PREFILL: Role.PREFILL, ProcessKind.DECODE: Role.DECODE}
_KINDS = {role: kind for kind, role in ROLES.items()}
_PROCESSES: dict[ProcessKind, tuple[str, type]] = {
    ProcessKind.DIRECTORY: ("directory", DirectoryConfig),
    ProcessKind.CONDUCTOR: ("conductor", ConductorConfig),
    ProcessKind.STORE: ("store", StoreConfig),
    ProcessKind.PREFILL: ("worker --role prefill", PrefillConfig),
    ProcessKind.DECODE: ("worker --role decode", DecodeConfig),
    ProcessKind.GATEWAY: ("gateway", GatewayConfig),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to start as `python *argv *flags`."""

    instance_id: str
    kind: ProcessKind
    argv: tuple[str, ...]  # such as ("-m", "moonserve", "store")
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = STOP_GRACE_S  # from SIGTERM to SIGKILL
    nice: int = 0  # as in nice(1): a higher value is a lower priority
    fds: tuple[int, ...] = ()  # descriptors that the process inherits from the launcher
    python: str | None = None  # interpreter; None = the launcher's own
    overlaps: bool = False  # while it is replaced, it and its successor serve at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of processes that depend on where they run."""

    conductor: str  # comma-separated addresses
    model_path: str = ""  # the model's folder there, for workers and gateways
    host: str | None = None  # address to listen on and to publish; None = loopback
    ledger: str | None = None  # file for the shares of the host's memory budget
    registry: str | None = None  # that store nodes join for vLLM's connectors; None = they join the conductor
    drain_s: float = DRAIN_S  # seconds for requests in flight to finish

    @property
    def stop_grace_s(self) -> float:
        """Seconds from SIGTERM to SIGKILL: the drain and the time for the steps after it."""
        return self.drain_s + STOP_GRACE_S - DRAIN_S

    @property
    def listening(self) -> dict[str, str]:
        return {} if self.host is None else {"host": self.host}


def conductor_spec(
    config: ServeConfig, port: str = "0", number: int = 0, site: HostOptions | None = None, addresses: str = ""
) -> ProcessSpec:
    """Returns the spec of a conductor. With port "0", the others can be started only once it reports its address.
    `addresses`: comma-separated, of all active conductors, if there are several."""
    instance_id = "conductor" if config.num_conductors == 1 else f"conductor-{number}"
    values = {"port": port, **({} if site is None else site.listening)}
    if config.active_conductors > 1:
        values["shards"] = addresses
    return _spec(config, instance_id, ProcessKind.CONDUCTOR, values)


def member_specs(
    config: ServeConfig,
    model_path: str,
    conductor: str,
    ledger: str | None = None,
    gpus: Sequence[str] = (),
    listener: int | None = None,
    registry: str | None = None,
    cores: Sequence[int] = (),
    core_table: int | None = None,
) -> list[ProcessSpec]:
    """Returns the specs of all other processes: store nodes, workers, gateways. `conductor`: comma-separated addresses;
    `ledger`: file for the shares of a memory budget, unless the configuration names another; `gpus`: GPUs of this
    machine as named in CUDA_VISIBLE_DEVICES; `listener`: see `deploy.launcher.ports.ReservedPort`; `registry`:
    see `HostOptions`; `cores`: this machine's, if vLLM workers are to be bound to them; `core_table`: descriptor of
    the memory in which workers show when they compute (`engine.kernels.shared_cores`)."""
    site = HostOptions(conductor=conductor, model_path=model_path, ledger=ledger, registry=registry)
    specs = [store_spec(config, site, f"store-{i}") for i in range(config.store_nodes)]
    gpus = gpus if config.device in ("auto", "cuda") else ()
    for index, (name, role, turn) in enumerate(_workers(config)):
        if config.engine == "vllm":
            device = vllm_workers.device_environment(config, index, gpus, cores)
            specs.append(vllm_worker_spec(config, site, name, role, device))
            continue
        # Each worker sees only its own GPU. Workers on the same GPU share its memory evenly.
        num_gpus = len(gpus) or 1
        num_sharing = len(range(index % num_gpus, config.num_workers, num_gpus))
        share = config.gpu_memory_utilization / num_sharing
        home = f"store-{turn % config.store_nodes}" if config.store_nodes else None
        spec = worker_spec(config, site, name, role, home=home, share=share)
        if core_table is not None and config.lends_cores and not gpus:
            place = f"/proc/self/fd/{core_table}:{index}"
            spec = replace(spec, flags=(*spec.flags, "--shared-cores", place), fds=(core_table,))
        seen = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
        specs.append(replace(spec, environment={**spec.environment, **seen}))
    gateways = range(config.gateways)
    return [*specs, *(gateway_spec(config, site, f"gateway-{i}", listener) for i in gateways)]


def _workers(config: ServeConfig) -> list[tuple[str, Role, int]]:
    """Returns the name, first role and index of each worker; the index selects its home store node. Names of workers
    that may change roles do not contain a role."""
    prefills = [(f"prefill-{i}", Role.PREFILL, i) for i in range(config.prefill_workers)]
    decodes = [(f"decode-{i}", Role.DECODE, i) for i in range(config.decode_workers)]
    if config.role_switching == "off":
        return prefills + decodes
    return [(f"worker-{i}", role, i) for i, (_, role, _) in enumerate(prefills + decodes)]


def worker_spec(
    config: ServeConfig,
    site: HostOptions,
    instance_id: str,
    role: Role,
    *,
    home: str | None = None,
    share: float | None = None,
) -> ProcessSpec:
    """Returns the spec of a worker. `home`: its home store node; `share`: of its GPU's memory, None = as configured."""
    size = config.tensor_parallel_sizes[0 if role is Role.PREFILL else 1]
    values = {
        **site.listening,
        "conductor": site.conductor,
        "model": site.model_path,
        "drain_timeout_s": str(site.drain_s),
        "tensor_parallel_size": str(size),
        "num_threads": str(max(config.threads_per_worker, size)),  # at least one per rank
    }
    ledger = config.kv_memory_ledger or site.ledger
    if config.kv_memory_budget is not None and ledger is not None:
        values |= {"kv_memory_ledger": ledger, "kv_memory_floor": str(config.memory_floor)}
    is_group = role is Role.PREFILL and config.pipeline_parallel_size > 1
    if home is not None and not is_group:  # pipeline stages have no whole blocks for a store
        values["home_store"] = home
    if share is not None:
        values["gpu_memory_utilization"] = f"{share:.4g}"
    process = _PROCESSES[_KINDS[role]]
    if config.role_switching == "on":
        process, values["role"] = ("worker --role-switching on", RoleSwitchingConfig), role.value
    elif config.conditional_disaggregation == "on" and role is Role.DECODE:
        process = "worker --role decode --conditional-disaggregation on", LocalPrefillConfig
    spec = _spec(config, instance_id, _KINDS[role], values, process)
    return replace(spec, nice=config.worker_nice, stop_grace_s=site.stop_grace_s)


def vllm_worker_spec(
    config: ServeConfig,
    site: HostOptions,
    instance_id: str,
    role: Role,
    device: tuple[Mapping[str, str], tuple[str, ...]] = ({}, ()),
) -> ProcessSpec:
    """Returns the spec of a worker whose engine is vLLM. `device`: see `vllm_workers.device_environment`."""
    environment, items = device
    values = {
        **site.listening,
        "conductor": site.conductor,
        "model": site.model_path,
        "drain_timeout_s": str(site.drain_s),
        "kv_join": site.registry,
    }
    process = f"worker --engine vllm --role {role.value}", VllmConfig
    options = replace(config, vllm=(*items, *config.vllm))
    spec = _spec(options, instance_id, _KINDS[role], values, process)
    python = config.vllm_python or sys.executable
    return replace(
        spec,
        python=python,
        nice=config.worker_nice,
        stop_grace_s=site.stop_grace_s + vllm_workers.STOP_S,
        environment={**vllm_workers.interpreter_environment(python), **spec.environment, **environment},
    )


def gateway_spec(config: ServeConfig, site: HostOptions, instance_id: str, listener: int | None = None) -> ProcessSpec:
    """Returns the spec of a gateway at the endpoint's address, on any host. `listener`: see
    `deploy.launcher.ports.ReservedPort`."""
    names = config.served_model_name or (config.model or DEMO_MODEL_NAME,)
    values = {
        "conductor": site.conductor,
        "model": site.model_path,
        "host": config.host,
        "port": str(config.port),
        "served_model_name": ",".join(names),
        "drain_s": str(site.drain_s),
    }
    if config.engine == "vllm":
        values["worker_patience_s"] = str(max(config.worker_patience_s, vllm_workers.PATIENCE_S))
    spec = _spec(config, instance_id, ProcessKind.GATEWAY, values)
    spec = replace(spec, stop_grace_s=site.stop_grace_s)
    if listener is not None:
        flags = (*spec.flags, "--listen-fd", str(listener))
        return replace(spec, flags=flags, fds=(listener,), overlaps=True)
    return replace(spec, flags=(*spec.flags, "--reuse-port"), overlaps=True) if config.gateways > 1 else spec


def store_spec(config: ServeConfig, site: HostOptions, instance_id: str) -> ProcessSpec:
    """Returns the spec of a store node. Each of several store nodes with a disk has its own folder on it."""
    values: dict[str, str | None] = {**site.listening, "conductor": site.conductor}
    if site.registry is not None:
        values |= {"join": site.registry, "conductor": None}
    if config.ssd is not None and config.store_nodes > 1:
        folder, _, size = config.ssd.rpartition(":")
        values["ssd"] = f"{folder.rstrip('/')}/{instance_id}:{size}"
    spec = _spec(config, instance_id, ProcessKind.STORE, values)
    flush_s = 0.0 if config.ssd is None else config.ssd_flush_s
    return replace(spec, stop_grace_s=STOP_GRACE_S + flush_s)


def directory_spec(config: ServeConfig, site: HostOptions, port: int) -> ProcessSpec:
    """Returns the spec of the embedded registry of a cluster without Redis, at a port that is fixed in advance."""
    values = {**site.listening, "port": str(port), "registry": None}
    return _spec(config, "directory", ProcessKind.DIRECTORY, values)


def _spec(
    config: ServeConfig,
    instance_id: str,
    kind: ProcessKind,
    values: Mapping[str, str | None],
    process: tuple[str, type] | None = None,
) -> ProcessSpec:
    """Returns a spec. `values`: options that override the configuration; None = omit, so that the default applies."""
    command, config_class = process or _PROCESSES[kind]
    flags: list[str] = ["--instance-id", instance_id]
    environment: dict[str, str] = {}
    for option in options_of(config_class):
        if option.name in values:
            own = values[option.name]
            given = [] if own is None else [option.flag, own]
        elif option.name not in _NOT_INHERITED and not option.secret and hasattr(config, option.name):
            given = flags_of(option, getattr(config, option.name))
        else:
            continue
        if option.masked and given:  # process lists show flags
            environment[option.env] = given[-1]
        else:
            flags += given
    return ProcessSpec(
        instance_id=instance_id,
        kind=kind,
        argv=("-m", "moonserve", *command.split()),
        flags=tuple(flags),
        environment=environment,
    )
