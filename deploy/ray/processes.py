"""Single processes of a cluster on Ray: their names, shares of a host, addresses and specs. Pure."""

from dataclasses import dataclass, replace

from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.launcher.process_specs import (
    ROLES,
    HostOptions,
    ProcessKind,
    ProcessSpec,
    conductor_spec,
    directory_spec,
    gateway_spec,
    store_spec,
    vllm_worker_spec,
    worker_spec,
)
from moonserve.deploy.ray.config import ClusterConfig, Share


@dataclass(frozen=True, slots=True, order=True)
class PlannedProcess:
    """One planned process."""

    kind: ProcessKind
    number: int

    def name(self, config: ClusterConfig) -> str:
        """Returns the name of its actor, which is the instance id of its process."""
        if self.kind is ProcessKind.DIRECTORY:
            return "directory"
        if self.kind is ProcessKind.CONDUCTOR and config.conductors.count == 1:
            return "conductor"
        if self.kind in ROLES and config.serve.role_switching == "on":
            return f"worker-{2 * self.number + (self.kind is ProcessKind.DECODE)}"  # the role may change
        return f"{self.kind}-{self.number}"


def resources_of(config: ClusterConfig, kind: ProcessKind) -> Share:
    """Returns the share of its host that a process of this kind takes."""
    shares: dict[ProcessKind, Share] = {
        ProcessKind.DIRECTORY: config.directory,
        ProcessKind.CONDUCTOR: config.conductors,
        ProcessKind.STORE: config.stores,
        ProcessKind.PREFILL: config.prefill,
        ProcessKind.DECODE: config.decode,
        ProcessKind.GATEWAY: config.gateways,
    }
    return shares[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses of the processes that all others must find. They are fixed when the first hosts are seen."""

    head: str  # of Ray's head, without a port
    conductors: str  # all possible addresses, comma-separated
    registry: str | None  # None = the only conductor needs none


def addresses_of(config: ClusterConfig, hosts: tuple[str, ...], head: str) -> Addresses:
    """Returns the addresses. `hosts`: network addresses that may have a conductor; `head`: address of Ray's head."""
    conductors = config.conductors
    ports = range(conductors.port, conductors.port + conductors.count)
    found = dict.fromkeys(f"{host}:{port}" for host in hosts for port in ports)
    embedded = f"{head}:{config.directory.port}" if config.needs_directory else None
    return Addresses(head=head, conductors=",".join(found), registry=config.registry or embedded)


def serve_config(config: ClusterConfig, addresses: Addresses) -> ServeConfig:
    """Returns the options that processes inherit."""
    return replace(
        config.serve,
        conductors=1 if config.conductors.active > 1 else config.conductors.count,
        active_conductors=config.conductors.active,
        gateways=config.gateways.count,
        prefill_workers=config.prefill.count,
        decode_workers=config.decode.count,
        store_nodes=int(config.stores.enabled),
        registry=addresses.registry,
    )


def process_spec(
    config: ClusterConfig, unit: PlannedProcess, serve: ServeConfig, site: HostOptions, home: str | None
) -> ProcessSpec:
    """Returns the spec of the unit's process at `site`. `home`: the store node on that host."""
    name = unit.name(config)
    if serve.engine == "vllm":  # its connectors find store nodes through the registry
        site = replace(site, registry=serve.registry)
    match unit.kind:
        case ProcessKind.DIRECTORY:
            return directory_spec(serve, site, config.directory.port)
        case ProcessKind.CONDUCTOR:
            port = config.conductors.port + unit.number
            return conductor_spec(serve, str(port), unit.number, site, site.conductor)
        case ProcessKind.STORE:
            return store_spec(serve, site, name)
        case ProcessKind.GATEWAY:
            return gateway_spec(serve, site, name)
    if serve.engine == "vllm":
        return vllm_worker_spec(serve, site, name, ROLES[unit.kind])
    own = config.prefill if unit.kind is ProcessKind.PREFILL else config.decode
    if serve.num_threads is None:
        serve = replace(serve, num_threads=own.num_threads)
    return worker_spec(serve, site, name, ROLES[unit.kind], home=home)
