"""Machines that can be simulated: the Mooncake paper's testbed, and what `moonserve profile` measured.

A measured one is a JSON file: a `format` line, the fields of `ModelProfile`, and `measured`, what they rest on, which
is not read. Its rule: whatever a simulation would stumble over later is refused with the file and the field named.

The paper's testbed is LLaMA3-70B on one machine of eight A800 per instance (FAST'25, §5.1 and its figures). Prefill and
single-request decode times are a fit to its published latencies (prefill 0.99 / 2.1 / 4.6 / 10.7 / 27.6 s at
8k … 128k tokens; decode 26 ms per token at 8k of context, 31 ms at 128k).

What a batch costs was not published. Beside the roofline of eight A800 (each 2.04 TB/s of memory, 312 TFLOP/s in bf16):

- the empty step, 25.6 ms: reading 140 GB of weights takes 8.6 ms; the rest is 160 all-reduces and launches;
- a token of context, 41 ns: its 320 KiB of KV take 20 ns, so that the published slope is half of the bandwidth. A batch
  reads its sequences' KV in the same kernels, with more of it under way, so not more slowly;
- a sequence, 0.11 ms: its matrix products at half of the peak. Below about 150 sequences (312 TFLOP/s ÷ 2.04 TB/s) they
  cost nothing beside the weights, so this is on the dear side.

A sequence of 12,000 tokens so adds 0.6 ms, and 120 of them make steps of 100 ms. 3.65 times that, which figure 15 asks
for (`traces.reproduction.figure_15`), would be KV read at 13 % of the bandwidth: nothing published says that.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, InvalidRequest
from protocol.profile import DecodeProfile, PrefillProfile
from traces.output import writing
from traces.simulator.spec import Crowding, ModelProfile, Overheads

_KV_BYTES_PER_TOKEN = 327_680  # l · (2d / gqa) · s: 80 · (2 · 8192 / 8) · 2 bytes
_DECODE_PER_TOKEN_S = (0.031 - 0.026) / (
    131_072 - 8_192
)  # of context, from the two published points
# Not published: one more sequence in the batch costs its matrix products, 2 · 70e9 flop at half of 8 · 312 TFLOP/s.
_DECODE_PER_SEQUENCE_S = 2 * 70e9 / (0.5 * 8 * 312e12)

LLAMA3_70B_8XA800 = ModelProfile(
    name="llama3-70b-8xa800",
    prefill=PrefillProfile(c0=0.0, c1=1.15e-4, c2=7.3e-10),
    decode=DecodeProfile(
        c0=0.026 - 8_192 * _DECODE_PER_TOKEN_S - _DECODE_PER_SEQUENCE_S,
        c1=_DECODE_PER_SEQUENCE_S,
        c2=_DECODE_PER_TOKEN_S,
    ),
    kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
    num_layers=80,
    nic_bytes_per_s=100e9,  # 800 Gbit/s
    device_bytes_per_s=128e9,
    disk_bytes_per_s=6e9,  # one PCIe 4 NVMe drive; not in the paper
    device_tokens=int(0.9 * (8 * 80e9 - 140e9) / _KV_BYTES_PER_TOKEN),
    dram_tokens=3_000_000,  # 1 TB
)

PROFILES = {profile.name: profile for profile in (LLAMA3_70B_8XA800,)}

FORMAT = "moonserve model profile 1"

_COEFFICIENTS: Mapping[str, type[PrefillProfile] | type[DecodeProfile]] = {
    "prefill": PrefillProfile,
    "decode": DecodeProfile,
}
_MAY_BE_ZERO = {"dram_tokens", "disk_tokens"}
_FIELDS = {field.name: field for field in dataclasses.fields(ModelProfile)}
_TYPES = typing.get_type_hints(ModelProfile)


def write_profile(
    profile: ModelProfile, path: Path, *, measured: Mapping[str, Any] | None = None
) -> None:
    """As JSON, whole or not at all. Raises ConfigError when the file cannot be written."""
    content = {"format": FORMAT, **dataclasses.asdict(profile), "measured": dict(measured or {})}
    partial = path.with_name(path.name + ".partial")
    with writing(f"the profile {path}"):
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)


def read_profile(path: Path) -> ModelProfile:
    """What `write_profile` wrote, or a person did. Raises ConfigError that names the file and what is wrong in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    try:
        return _parse(content)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parse(content: Any) -> ModelProfile:
    """Raises ValueError that says what is wrong."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'it needs "format": "{FORMAT}"; moonserve profile --json writes such')
    given = {name: value for name, value in content.items() if name not in ("format", "measured")}
    for name in given.keys() - _FIELDS.keys():
        close = difflib.get_close_matches(name, _FIELDS, n=1)
        raise ValueError(
            f"unknown field {name!r}" + (f"; did you mean {close[0]}?" if close else "")
        )
    values = {name: _value(name, value) for name, value in given.items()}
    required = {n for n, field in _FIELDS.items() if field.default is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise ValueError(f"{', '.join(missing)} must be given")
    return ModelProfile(**values)


def _value(name: str, value: Any) -> Any:
    if name == "name":
        if not isinstance(value, str) or not value:
            raise ValueError("name must be a text")
        return value
    if name in _COEFFICIENTS:
        return _coefficients(name, value)
    if name == "overheads":
        return _overheads(value)
    if name == "crowding":
        return _crowding(value)
    whole = _TYPES[name] is int
    if not _is_number(value) or (whole and not isinstance(value, int)):
        raise ValueError(f"{name} must be a {'whole ' * whole}number, not {value!r}")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ValueError(f"{name} must be above 0, not {value!r}")
    return value if whole else float(value)


def _coefficients(name: str, value: Any) -> PrefillProfile | DecodeProfile:
    if not isinstance(value, dict) or set(value) != {"c0", "c1", "c2"}:
        raise ValueError(f"{name} must be c0, c1 and c2")
    if not all(_is_number(c) for c in value.values()) or not any(value.values()):
        raise ValueError(f"{name}: c0, c1 and c2 must be numbers, one of them above 0")
    try:
        return _COEFFICIENTS[name](**{c: float(number) for c, number in value.items()})
    except InvalidRequest as error:
        raise ValueError(f"{name}: {error.message}") from error


def _overheads(value: Any) -> Overheads:
    known = {field.name for field in dataclasses.fields(Overheads)}
    if not isinstance(value, dict) or not value.keys() <= known:
        raise ValueError(f"overheads may have {', '.join(sorted(known))}")
    if not all(_is_number(seconds) and seconds >= 0 for seconds in value.values()):
        raise ValueError("overheads are seconds, none below 0")
    return Overheads(**{name: float(seconds) for name, seconds in value.items()})


def _crowding(value: Any) -> Crowding:
    known = {field.name for field in dataclasses.fields(Crowding)}
    if not isinstance(value, dict) or not value.keys() <= known:
        raise ValueError(f"crowding may have {', '.join(sorted(known))}")
    gaps = value.get("gaps", [])
    if not isinstance(gaps, list) or not all(isinstance(each, list) for each in gaps):
        raise ValueError("crowding: gaps must be a list of lists")
    factors = {name: each for name, each in value.items() if name != "gaps"}
    return Crowding(
        **{name: _factors(name, each) for name, each in factors.items()},
        gaps=tuple(_shares(each) for each in gaps),
    )


def _factors(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(_is_number(f) and f > 0 for f in value):
        raise ValueError(f"crowding: {name} must be a list of factors above 0")
    return tuple(map(float, value))


def _shares(value: list[Any]) -> tuple[float, ...]:
    if not all(_is_number(q) and q >= 0 for q in value) or not any(value):
        raise ValueError("crowding: gaps are factors, none below 0 and some above")
    return tuple(map(float, value))


def _is_number(value: Any) -> bool:
    """A bool is an int to Python, and JSON as Python reads it has NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
