"""Checks whether this process can run CUDA and Triton, before anything is tried.

The extra `gpu` installs the dependencies; without it, the error messages name it. On a machine without a GPU, kernels
run in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was imported: slow, for tests.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from protocol.errors import ConfigError

INSTALL = "pip install 'moonserve[gpu]'"
LEAST_CAPABILITY = (8, 0)
"""Least compute capability, for which tests compile the kernels. Older GPUs do not multiply bfloat16."""


def require_triton(device: torch.device) -> None:
    """Raises ConfigError, with the remedy, if Triton kernels cannot run on tensors of `device`."""
    if find_spec("triton") is None:
        raise ConfigError(f"Triton is not installed: {INSTALL}")
    if device.type == "cuda" or is_interpreted():
        return
    raise ConfigError(
        f"Triton kernels run on a CUDA device, not on {device.type!r} "
        "(TRITON_INTERPRET=1 interprets them there, for tests)"
    )


def why_not_cuda() -> str | None:
    """Returns the reason why this machine has no usable GPU, with the remedy, or None if it has one."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else "; this torch was built without CUDA: install one with it"
        return f"torch sees no GPU here{built}"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, and {least} is the least"
    if find_spec("triton") is None:
        return f"Triton is not installed: {INSTALL}"
    return None


def gpus() -> list[tuple[str, int, int]]:
    """Returns (name, total bytes of memory, free bytes) of each GPU."""
    found = []
    for number in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        found.append((torch.cuda.get_device_name(number), total_bytes, free_bytes))
    return found


def find_device(name: str) -> torch.device:
    """Returns the torch device called `name`. Raises ConfigError if the name is invalid or there is no CUDA device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is not a device: cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device: there is none here, or torch was built without CUDA")
    return device


def is_interpreted() -> bool:
    """Returns True if kernels run in Triton's interpreter, on any device."""
    import triton

    return bool(triton.knobs.runtime.interpret)
