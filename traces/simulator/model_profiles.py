"""Profiles of simulated machines: the Mooncake paper's testbed, and measurements by `moonserve profile`.

A measured profile is a JSON file: a `format` line, the fields of `ModelProfile`, and `measured`, the underlying
measurements, which are not read. Rule: a value that would break a simulation later is rejected with its file and field.

The paper's testbed is LLaMA3-70B on one machine of eight A800 per instance (FAST'25, §5.1 and its figures). Prefill and
single-request decode times are a fit to its published latencies (prefill 0.99 / 2.1 / 4.6 / 10.7 / 27.6 s at
8k … 128k tokens; decode 26 ms per token at 8k of context, 31 ms at 128k).

The cost of a batch is not published. Compared with the roofline of eight A800 (each 2.04 TB/s, 312 TFLOP/s in bf16):

- the empty step, 25.6 ms: reading 140 GB of weights takes 8.6 ms; the rest is 160 all-reduces and launches;
- a token of context, 41 ns: its 320 KiB of KV take 20 ns, so the published slope is half of the bandwidth. A batch
  reads its sequences' KV in the same kernels, with more reads in flight, so not more slowly;
- a sequence, 0.11 ms: its matrix products at half of the peak. Below about 150 sequences (312 TFLOP/s ÷ 2.04 TB/s) they
  cost nothing in addition to the weights, so this is an overestimate.

So a sequence of 12,000 tokens adds 0.6 ms, and 120 of them make steps of 100 ms. 3.65 times that, as figure 15 requires
(`benchmarks.reproduction.figures_13_14_15`), would mean reading KV at 13 % of the bandwidth: no published figure says
that.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moonserve.protocol.errors import ConfigError, InvalidRequest
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.output import explain_write_errors
from moonserve.traces.simulator.spec import ModelProfile

_KV_BYTES_PER_TOKEN = 327_680  # l · (2d / gqa) · s: 80 · (2 · 8192 / 8) · 2 bytes
_DECODE_PER_TOKEN_S = (0.031 - 0.026) / (131_072 - 8_192)  # per token of context, from the two published points
# Not published: a further sequence costs its matrix products, 2 · 70e9 flop at half of 8 · 312 TFLOP/s.
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

_PROFILE = TypeAdapter(ModelProfile)


def write_profile(profile: ModelProfile, path: Path, *, measured: Mapping[str, Any] | None = None) -> None:
    """Writes a profile as JSON, atomically. Raises ConfigError if the file cannot be written."""
    content = {"format": FORMAT, **dataclasses.asdict(profile), "measured": dict(measured or {})}
    partial = path.with_name(path.name + ".partial")
    with explain_write_errors(f"the profile {path}"):
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)


def read_profile(path: Path) -> ModelProfile:
    """Reads a profile written by `write_profile` or by hand. Raises ConfigError naming the file and the fault."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ConfigError(f'{path} needs "format": "{FORMAT}"; moonserve profile --json writes such')
    content.pop("measured", None)
    try:
        profile = _PROFILE.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(faults)}") from error
    except InvalidRequest as error:  # from the coefficients of the formulas
        raise ConfigError(f"{path}: {error.message}") from error
    if not any(dataclasses.astuple(profile.prefill)) or not any(dataclasses.astuple(profile.decode)):
        raise ConfigError(f"{path}: one of c0, c1 and c2 must be above 0, of prefill and of decode")
    return profile
