"""GPUs for `moonserve doctor`: what the drivers show, and whether a worker could compute on it.

Its rule: where the drivers show none, torch is not imported, which takes seconds.
"""

from __future__ import annotations

from deploy.doctor.findings import Finding, State
from deploy.terminal.amounts import size
from engine.device import Gpu, count_gpus, usable_gpus
from protocol.errors import ConfigError

SECTION = "gpu"


def check_gpus() -> list[Finding]:
    """A line for each GPU; one where there is none, or none that can be used."""
    num_shown = count_gpus()
    if num_shown == 0:
        return [Finding(SECTION, "devices", State.OK, "none; workers compute on the processor")]
    try:
        return [_usable(number, gpu) for number, gpu in enumerate(usable_gpus())]
    except ConfigError as error:
        return [_unusable(num_shown, error.message)]
    except ImportError as error:
        return [_unusable(num_shown, f"torch cannot be imported ({error}): pip install torch")]


def _usable(number: int, gpu: Gpu) -> Finding:
    facts = {"name": gpu.name, "total_bytes": gpu.total_bytes, "free_bytes": gpu.free_bytes}
    text = f"{gpu.name}, {size(gpu.total_bytes)}, {size(gpu.free_bytes)} free"
    if 2 * gpu.free_bytes >= gpu.total_bytes:
        return Finding(SECTION, f"cuda:{number}", State.OK, text, facts=facts)
    remedy = "end what uses it (nvidia-smi), or give workers less: --gpu-memory-utilization"
    return Finding(SECTION, f"cuda:{number}", State.WARN, text, remedy, facts)


def _unusable(num_shown: int, why: str) -> Finding:
    text = f"{num_shown} shown by the driver, none used: workers compute on the processor"
    return Finding(SECTION, "devices", State.WARN, text, why, {"shown": num_shown})
