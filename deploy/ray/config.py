"""Configuration of a cluster on Ray: one YAML file, read into frozen dataclasses by pydantic.

`serve:` holds options of `moonserve serve` under their own names. Other sections hold the counts of processes, their
shares of a host, and their ports. Knows nothing of Ray except the names of its resources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    with_config,
)

from moonserve.conductor.role_switching import RoleThresholds
from moonserve.deploy.launcher.config import ServeConfig
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import flags_of, load_config, nearest, options_of, parse_bytes

# Default ports, below the range that Linux assigns (from 32,768).
CONDUCTOR_PORT = 7100
DIRECTORY_PORT = 7090

Bytes = Annotated[NonNegativeInt, BeforeValidator(lambda value: parse_bytes(str(value)))]
Port = Annotated[int, Field(gt=0, lt=65536)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]

_section = with_config(ConfigDict(extra="forbid"))


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Resources that one process takes of its host, in Ray's terms."""

    cpus: NonNegativeFloat = 0.1
    gpus: NonNegativeFloat = 0.0
    memory: Bytes = 0
    resources: Mapping[str, NonNegativeFloat] = field(default_factory=dict)  # custom resources, by the host's names

    def __post_init__(self) -> None:
        empty = "give cpus, gpus, memory or resources: Ray reserves no empty place"
        _require(bool(self.bundle()), empty)

    def bundle(self) -> dict[str, float]:
        """Returns the share as a bundle of a placement group."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory)}
        return {name: amount for name, amount in {**named, **self.resources}.items() if amount}


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class Gateways(Share):
    """HTTP endpoints. Gateways on one host share its port."""

    count: PositiveInt = 1


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class Conductors(Gateways):
    """Conductors: one leads, the others stand by. Number n listens on `port` + n, on any of the possible hosts."""

    count: PositiveInt = 2
    active: PositiveInt = 1  # more = so many, each with its own share of the instances, instead of a leader
    port: Port = CONDUCTOR_PORT
    hosts: PositiveInt = 8  # number of possible hosts; every process asks all of them for the leader

    def __post_init__(self) -> None:
        super(Conductors, self).__post_init__()
        if self.active > 1:
            object.__setattr__(self, "count", self.active)
        last = self.port + self.count - 1
        _require(last < 65536, f"port {self.port} to {last} is not below 65536")


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class Stores(Share):
    """A store node on every host that can have a worker."""

    enabled: bool = True


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Share):
    """Workers of one role: the initial count, and the bounds of the autoscaler."""

    cpus: NonNegativeFloat = 1.0
    count: int = 1
    min: int = 1
    max: int | None = None  # None = `count`

    def __post_init__(self) -> None:
        super(Workers, self).__post_init__()
        _require(
            1 <= self.min <= self.count <= self.most,
            f"1 <= min ({self.min}) <= count ({self.count}) <= max ({self.most}) must hold",
        )

    @property
    def most(self) -> int:
        return self.count if self.max is None else self.max

    @property
    def num_threads(self) -> int:
        """Compute threads of a worker with this many processors."""
        return max(1, int(self.cpus))


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class Directory(Share):
    """The embedded registry, used if no Redis is given. It is on Ray's head, without which Ray does not work either."""

    port: Port = DIRECTORY_PORT


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTerms:
    """Thresholds and times of the autoscaler. Values that would oscillate are rejected."""

    # `high` is that of role switching (`RoleThresholds`). `low` is lower: a removed worker is expensive to bring back.
    high: float = RoleThresholds().high
    low: PositiveFloat = 0.4
    up_hold_s: NonNegativeFloat = 20.0  # longer than role switching takes to decide
    down_hold_s: NonNegativeFloat = 300.0
    cool_down_s: NonNegativeFloat = 60.0  # the effect of a change must show before the next

    def __post_init__(self) -> None:
        _require(self.low < self.high, f"low {self.low} must be below high {self.high}")


@_section
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Configuration of a cluster on Ray."""

    serve: SkipValidation[ServeConfig]  # its counts of processes are ignored
    name: Name = "moonserve"  # suffix of Ray's namespace, after `moonserve-`
    registry: str | None = None  # redis://… or redis+sentinel://…; None = the embedded one
    conductors: Conductors = field(default_factory=Conductors)
    directory: Directory = field(default_factory=Directory)
    gateways: Gateways = field(default_factory=Gateways)
    stores: Stores = field(default_factory=Stores)
    prefill: Workers = field(default_factory=Workers)
    decode: Workers = field(default_factory=Workers)
    autoscale: ScaleTerms | None = None
    drain_s: PositiveFloat = 30.0  # for requests in flight to finish before a process stops
    silence_s: PositiveFloat = 3.0  # a host whose raylet does not answer for this long is lost

    @property
    def needs_directory(self) -> bool:
        """True if the conductors elect their leader through the embedded registry."""
        return self.registry is None and self.conductors.count > 1 and self.conductors.active == 1

    @property
    def namespace(self) -> str:
        return f"moonserve-{self.name}"


_CLUSTER = TypeAdapter(ClusterConfig)
_KEYS = {each.name for section in (ClusterConfig, Conductors, Stores, Workers, ScaleTerms) for each in fields(section)}
# Options that have other keys outside of `serve`: counts, and the registry.
_ELSEWHERE = {
    "conductors": "conductors.count",
    "active_conductors": "conductors.active",
    "gateways": "gateways.count",
    "prefill_workers": "prefill.count",
    "decode_workers": "decode.count",
    "store_nodes": "stores.enabled",
    "registry": "registry",
}


def load_cluster(path: Path) -> ClusterConfig:
    """Reads a YAML file. Raises ConfigError, which names the file and the key."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        return parse_cluster(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_cluster(document: object) -> ClusterConfig:
    """Parses a YAML document, also in the form of Ray's `serve deploy`. Raises ConfigError, which names the key."""
    values = _underscored(document, "the file")
    if (applications := values.get("applications")) is not None:
        is_one = isinstance(applications, list) and len(applications) == 1
        _require(is_one, "applications must be a list of one, whose args describe the cluster")
        values = _underscored(_underscored(applications[0], "applications").get("args"), "args")
    serve = _underscored(values.pop("serve", {}), "serve")
    if "model" in values:
        serve = {"model": values.pop("model"), **serve}
    sections = {key: _underscored(value, key) if isinstance(value, Mapping) else value for key, value in values.items()}
    options = _serve(serve, values.get("registry"))
    try:
        return _CLUSTER.validate_python({**sections, "serve": options})
    except ValidationError as error:
        raise ConfigError(_error_text(error.errors()[0])) from error


def _underscored(values: object, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must hold keys and values, not {values!r}")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _error_text(error: Mapping[str, Any]) -> str:
    """Formats an error of pydantic in one line."""
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown key {path!r}{nearest(str(error['loc'][-1]), _KEYS)}"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}"


def _serve(values: Mapping[str, Any], registry: object) -> ServeConfig:
    """Returns options of `moonserve serve` with the YAML's values."""
    options = {option.name: option for option in options_of(ServeConfig)}
    flags: list[str] = []
    if registry is not None:  # some options need a registry, whose address may be known only later
        flags += ["--registry", str(registry)]
    for name, value in values.items():
        if name in _ELSEWHERE:
            raise ConfigError(f"serve.{name} is not an option here: give {_ELSEWHERE[name]} outside of serve")
        if name not in options:
            raise ConfigError(f"serve has no option {name!r}{nearest(name, options)}")
        option = options[name]
        flags += flags_of(option, [value] if option.passed_on and not isinstance(value, list) else value)
    return load_config(ServeConfig, flags, prog="serve", environ={})


def _require(holds: bool, message: str) -> None:
    """Raises ValueError unless `holds`. pydantic adds the location."""
    if not holds:
        raise ValueError(message)
