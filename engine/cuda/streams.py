"""Typed access to torch's CUDA streams and events, and asynchronous copies of small tensors to a device."""

from __future__ import annotations

from typing import Any, Protocol

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to `device` without waiting for the copy. It goes through pinned memory: from other memory, the
    caller would wait for all work submitted before."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Returns True if the event has been reached."""

    def synchronize(self) -> None:
        """Waits until the event is reached."""


def record_event() -> Event:
    """Records an event after the work submitted to the current stream so far."""
    make: Any = torch.cuda.Event
    event: Any = make()
    event.record()
    reached: Event = event
    return reached


def wait_for(event: Event, device: torch.device) -> None:
    """Makes later work on the current stream wait for the event."""
    current: Any = torch.cuda.current_stream(device)
    current.wait_event(event)


def make_stream(device: torch.device) -> Any:
    """Creates a stream in addition to the default one."""
    make: Any = torch.cuda.Stream
    return make(device)
