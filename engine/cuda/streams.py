"""Streams and events of torch, with types, and the way of small tensors to a device that is busy."""

from __future__ import annotations

from typing import Any, Protocol

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. The copy waits for its turn there and nobody waits for the copy: from memory that is not
    pinned, it would hold the caller until all work before it is done."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Waits until it is reached."""


def record_event() -> Event:
    """The end of what the current stream has to do by now."""
    make: Any = torch.cuda.Event
    event: Any = make()
    event.record()
    reached: Event = event
    return reached


def wait_for(event: Event, device: torch.device) -> None:
    """What the current stream is given from now on waits for the event."""
    current: Any = torch.cuda.current_stream(device)
    current.wait_event(event)


def make_stream(device: torch.device) -> Any:
    """A stream beside the usual one."""
    make: Any = torch.cuda.Stream
    return make(device)
