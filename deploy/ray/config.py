"""What a cluster on Ray is told: one YAML file, read into frozen dataclasses.

`serve:` holds options of `moonserve serve` under their own names; how many processes there are, what each takes of its
host and where they find each other is said beside it. Knows nothing of Ray but the names of its resources.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from conductor.roles.controller import RoleTerms
from deploy.config import ServeConfig
from protocol.config import load, options_of, parse_bytes
from protocol.errors import ConfigError

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
# Where a port of its own is not given; below those that Linux hands out (32,768).
CONDUCTOR_PORT = 7100
DIRECTORY_PORT = 7090


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process takes of its host, in Ray's terms."""

    cpus: float = 0.1
    gpus: float = 0.0
    memory: int = 0  # bytes
    resources: Mapping[str, float] = field(default_factory=dict)  # of the host's own names

    def __post_init__(self) -> None:
        amounts = (self.cpus, self.gpus, self.memory, *self.resources.values())
        _require(min(amounts) >= 0, "cpus, gpus, memory and resources must not be negative")
        empty = "give cpus, gpus, memory or resources: Ray reserves no empty place"
        _require(max(amounts) > 0, empty)

    def bundle(self) -> dict[str, float]:
        """As placement groups take it."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory)}
        return {name: amount for name, amount in {**named, **self.resources}.items() if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateways(Share):
    """Endpoints; those on one host share its port."""

    count: int = 1

    def __post_init__(self) -> None:
        super(Gateways, self).__post_init__()
        _require(self.count >= 1, f"count is at least 1, not {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conductors(Gateways):
    """One leads, the others stand by. Number n listens on `port` + n, on whichever of its hosts it is."""

    count: int = 2
    port: int = CONDUCTOR_PORT
    hosts: int = 8  # on which they may be; everybody asks all of these for who leads

    def __post_init__(self) -> None:
        super(Conductors, self).__post_init__()
        _require(self.hosts >= 1, f"hosts is at least 1, not {self.hosts}")
        _require_port(self.port, self.port + self.count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores(Share):
    """A store node on every host that can have a worker."""

    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Share):
    """Workers of one role: how many at first, and between which bounds the autoscaler moves."""

    cpus: float = 1.0
    count: int = 1
    min: int = 1
    max: int | None = None  # as `count` when not given

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
        """Of a worker that computes on so many processors."""
        return max(1, int(self.cpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory(Share):
    """The embedded registry, where no Redis is given; on Ray's head, without which there is no Ray cluster either."""

    port: int = DIRECTORY_PORT

    def __post_init__(self) -> None:
        super(Directory, self).__post_init__()
        _require_port(self.port, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTerms:
    """When the autoscaler adds and removes workers. Raises ConfigError for values that would oscillate."""

    # As for role switching (`RoleTerms`), and lower for leaving: a worker costs more to bring back.
    high: float = RoleTerms().high
    low: float = 0.4
    up_hold_s: float = 20.0  # longer than role switching takes to decide
    down_hold_s: float = 300.0
    cool_down_s: float = 60.0  # what a change does must show before the next

    def __post_init__(self) -> None:
        low = f"low {self.low} must be above 0 and below high {self.high}"
        _require(0 < self.low < self.high, low)
        shortest = min(self.up_hold_s, self.down_hold_s, self.cool_down_s)
        _require(shortest >= 0, "up_hold_s, down_hold_s and cool_down_s must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster on Ray."""

    serve: ServeConfig  # counts in it are of no meaning here
    name: str = "moonserve"  # of Ray's namespace, after `moonserve-`
    registry: str | None = None  # redis://… or redis+sentinel://…; None = the embedded one
    conductors: Conductors = field(default_factory=Conductors)
    directory: Directory = field(default_factory=Directory)
    gateways: Gateways = field(default_factory=Gateways)
    stores: Stores = field(default_factory=Stores)
    prefill: Workers = field(default_factory=Workers)
    decode: Workers = field(default_factory=Workers)
    autoscale: ScaleTerms | None = None
    drain_s: float = 30.0  # that what is under way gets to finish before a process stops
    silence_s: float = 3.0  # a host whose raylet does not answer for so long is lost

    def __post_init__(self) -> None:
        _require(
            _NAME.fullmatch(self.name) is not None,
            f"name {self.name!r} must be up to 40 small letters, digits and hyphens",
        )
        _require(self.drain_s > 0, "drain_s must be above 0")
        _require(self.silence_s > 0, "silence_s must be above 0")

    @property
    def needs_directory(self) -> bool:
        """Whether the conductors agree by the embedded registry who of them leads."""
        return self.registry is None and self.conductors.count > 1

    @property
    def namespace(self) -> str:
        return f"moonserve-{self.name}"


# Counts, and what the launcher says itself, have their places outside of `serve`.
_ELSEWHERE = {
    "conductors": "conductors.count",
    "gateways": "gateways.count",
    "prefill_workers": "prefill.count",
    "decode_workers": "decode.count",
    "store_nodes": "stores.enabled",
    "registry": "registry",
}


def load_cluster(path: Path) -> ClusterConfig:
    """Reads the file. Raises ConfigError, which names the file and the key."""
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
    """From the YAML's own types. A document as `serve deploy` takes it, with one application, is its `args`. Raises
    ConfigError."""
    values = dict(_mapping(document, "the file"))
    if "applications" in values:
        values = _arguments(values["applications"])
    serve = _mapping(values.pop("serve", {}), "serve")
    if "model" in values:
        serve = {"model": values.pop("model"), **serve}
    return _section(ClusterConfig, values, "", serve=_serve(serve, values.get("registry")))


def _arguments(applications: object) -> dict[str, Any]:
    if not isinstance(applications, list) or len(applications) != 1:
        raise ConfigError("applications must be a list of one, whose args describe the cluster")
    return dict(_mapping(_mapping(applications[0], "applications").get("args"), "args"))


def _serve(values: Mapping[str, Any], registry: object) -> ServeConfig:
    """Options of `moonserve serve` with the YAML's values."""
    options = {option.name: option for option in options_of(ServeConfig)}
    flags: list[str] = []
    if registry is not None:  # some options need one, whose address may be known later
        flags += ["--registry", str(registry)]
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in _ELSEWHERE:
            raise ConfigError(f"serve.{key} is said as {_ELSEWHERE[name]} here, outside of serve")
        if name not in options:
            raise ConfigError(f"serve has no option {key!r}{_nearest(name, options)}")
        option = options[name]
        if option.type is bool:
            flags.append(option.flag if value is True else option.negated_flag)
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags += [option.flag, text]
    return load(ServeConfig, flags, prog="serve", environ={})


def _section(cls: type[T], values: Mapping[str, Any], where: str, **given: Any) -> T:
    hints = typing.get_type_hints(cls)
    known = {each.name for each in dataclasses.fields(cls)} - set(given)  # type: ignore[arg-type]  # a dataclass
    arguments = dict(given)
    for key, value in values.items():
        name, full = str(key).replace("-", "_"), f"{where}{key}"
        if name not in known:
            raise ConfigError(f"unknown key {full!r}{_nearest(name, known)}")
        arguments[name] = _converted(hints[name], name, value, full)
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where.rstrip('.')}: {error}" if where else str(error)) from error


def _converted(hint: Any, name: str, value: Any, full: str) -> Any:
    kinds = [each for each in typing.get_args(hint) if each is not type(None)]
    if value is None and type(None) in typing.get_args(hint):
        return None
    kind = kinds[0] if type(None) in typing.get_args(hint) else hint
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _section(kind, _mapping(value, full), f"{full}.")
    if typing.get_origin(kind) is not None:
        return {str(k): _number(float, v, f"{full}.{k}") for k, v in _mapping(value, full).items()}
    if name == "memory":
        return _bytes(value, full)
    if kind in (int, float):
        return _number(kind, value, full)
    if not isinstance(value, kind):
        raise ConfigError(f"{full} must be {_WORDS[kind]}, not {value!r}")
    return value


_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _number(kind: type, value: Any, full: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        is_number = is_number and kind(value) == value
    except (OverflowError, ValueError):  # neither infinity nor NaN is whole
        is_number = False
    if not is_number:
        raise ConfigError(f"{full} must be {_WORDS[kind]}, not {value!r}")
    return kind(value)


def _bytes(value: Any, full: str) -> int:
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise ConfigError(f"{full}: {error}") from error


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold keys and values, not {value!r}")
    return value


def _nearest(word: str, known: typing.Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _require_port(first: int, last: int) -> None:
    _require(0 < first <= last < 65536, f"port {first} to {last} is not within 1 to 65535")
