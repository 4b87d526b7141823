"""Resolves `--device`, finds GPUs and checks whether CUDA and Triton can run. Imports torch only if there may be a GPU.

The extra `gpu` installs what CUDA needs; without it, the error messages name it. On a machine without a GPU, kernels
run in Triton's interpreter if TRITON_INTERPRET=1 was set before Triton was imported: slow, for tests.

`cpu-staged` is a device for tests on any machine. It computes on the CPU, but from memory that only
`engine.cuda.staging` reaches, like a GPU's, so that a missing load or store is detected without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moonserve.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

CPU, CUDA, STAGED = "cpu", "cuda", "cpu-staged"
DEVICES = ("auto", CPU, CUDA, STAGED)

INSTALL = "pip install 'moonserve[gpu]'"
LEAST_CAPABILITY = (8, 0)
"""Least compute capability, for which tests compile the kernels. Older GPUs do not multiply bfloat16."""

# Traces of the drivers: a folder per GPU, a device file per GPU, and the single device file under WSL.
_TRACES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))


def require_triton(device: "torch.device") -> None:
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
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else "; this torch was built without CUDA: install one with it"
        return f"torch sees no GPU here{built}"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, and at least {least} is required"
    return f"Triton is not installed: {INSTALL}" if find_spec("triton") is None else None


def list_gpus() -> list[tuple[str, int, int]]:
    """Returns (name, total bytes of memory, free bytes) of each GPU."""
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        found.append((torch.cuda.get_device_name(number), total_bytes, free_bytes))
    return found


def find_device(name: str) -> "torch.device":
    """Returns the torch device called `name`. Raises ConfigError if the name is invalid or there is no CUDA device."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is not a device like cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device: there is none here, or torch was built without CUDA")
    return device


def is_interpreted() -> bool:
    """Returns True if kernels run in Triton's interpreter, on any device."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def resolve_device(name: str) -> str:
    """Returns `cpu`, `cuda` or `cpu-staged`; auto means cuda if it is usable, else cpu. Raises ConfigError, with the
    remedy, if cuda is requested but not usable."""
    if name in (CPU, STAGED) or (name == "auto" and count_gpus() == 0):
        return name if name != "auto" else CPU
    reason = why_not_cuda()
    if reason is None:
        return CUDA
    if name == "auto":
        return CPU
    raise ConfigError(f"--device cuda: {reason}; or start with --device cpu")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that a worker can compute on."""

    name: str
    total_bytes: int
    free_bytes: int


def usable_gpus() -> list[Gpu]:
    """Returns the usable GPUs in the order of torch's device numbers. Imports torch and takes some memory of each GPU.
    Raises ConfigError, with the remedy, if none is usable."""
    if (reason := why_not_cuda()) is not None:
        raise ConfigError(reason)
    return [Gpu(*found) for found in list_gpus()]


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPU names in CUDA_VISIBLE_DEVICES, or the numbers of all GPUs if it is not set."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    return tuple(map(str, range(count_gpus())))


def count_gpus(root: Path = Path("/")) -> int:
    """Returns how many GPUs the drivers show, whether torch can use them or not."""
    return max(len(list((root / folder.lstrip("/")).glob(pattern))) for folder, pattern in _TRACES)
