"""Small tensors on their way to the device, which is in the middle of something."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. The copy waits for its turn there and nobody waits for the copy: from memory that is not
    pinned, it would hold the caller until all work before it is done."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
