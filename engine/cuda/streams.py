"""Typed access to torch's CUDA streams and events, asynchronous copies of small tensors, and mapped host memory."""

import weakref
from typing import Any, Protocol

import torch

from moonserve.protocol.errors import ConfigError


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to `device` without waiting for the copy. It goes through pinned memory: from other memory, the
    caller would wait for all work submitted before."""
    return tensor if tensor.device.type == device.type else tensor.pin_memory().to(device, non_blocking=True)


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


def map_host_memory(memory: memoryview, device: torch.device) -> torch.Tensor:
    """Returns writable host memory as uint8 [bytes] on `device`, which reads and writes it over the bus. The memory is
    pinned until the tensor is gone. Raises ConfigError if it cannot be."""
    on_host = torch.frombuffer(memory, dtype=torch.uint8)
    return on_host if device.type == "cpu" else torch.as_tensor(_Pinned(on_host), device=device)


class _Pinned:
    """Memory that the device reaches at its address on the host. torch keeps this object while a tensor uses it."""

    def __init__(self, on_host: torch.Tensor) -> None:
        self._on_host = on_host
        address, nbytes = on_host.data_ptr(), on_host.numel()
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        if error := int(runtime.cudaHostRegister(address, nbytes, 0)):
            raise ConfigError(f"{nbytes} bytes of host memory cannot be pinned for the GPU (CUDA error {error})")
        weakref.finalize(self, runtime.cudaHostUnregister, address)
