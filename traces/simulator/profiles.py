"""Machines that can be simulated: the Mooncake paper's testbed, and what `moonserve profile` measured.

The paper's testbed is LLaMA3-70B on one machine of eight A800 per instance (FAST'25, §5.1 and its figures). Prefill and
single-request decode times are a fit to its published latencies (prefill 0.99 / 2.1 / 4.6 / 10.7 / 27.6 s at
8k … 128k tokens; decode 26 ms per token at 8k of context, 31 ms at 128k).
"""

from __future__ import annotations

from protocol.profile import DecodeProfile, PrefillProfile
from traces.simulator.spec import ModelProfile

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
