"""A CUDA device's memory as elastic memory, by CUDA's virtual memory management (driver API, `cuda-bindings`).

A frame is one physical allocation (`cuMemCreate`, 2 MiB on today's devices). Making one is the slow call (193 µs on an
A100, against 1.5 µs to map, 36 µs to set access and 26 µs to unmap: kvcached), so that a frame, once made, is kept and
used again for whichever model gets it next, until the budget shrinks or the backing is closed.

Never run on a GPU so far. Names, enumerations and signatures were compared with cuda-bindings 13.5; the tests drive it
against a driver in memory that refuses what CUDA's documentation forbids (a frame mapped twice, access before mapping,
an address range freed while mapped). Open on a real device: how torch takes the range, which is what
`__cuda_array_interface__` is for, while parts of it are not mapped. A recycled frame still holds what its last model
wrote, as any device allocation does.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from engine.elastic.base import MappingFailed
from engine.elastic.pages import Frame
from protocol.errors import ConfigError

INSTALL = "elastic CUDA memory needs the CUDA driver's bindings: pip install cuda-bindings"


def load_driver() -> Any:
    """`cuda.bindings.driver`. Raises ConfigError with the install line where it is missing."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(f"{INSTALL} ({error})") from error


class CudaError(Exception):
    """The driver refused a call."""

    def __init__(self, call: str, result: Any) -> None:
        super().__init__(f"{call}: {getattr(result, 'name', result)}")
        self.result = result


class CudaBacking:
    """Physical memory of one device, in its primary context. `synchronize` is waited for before anything is unmapped:
    by default all of the device's work, since a step that was launched may still read blocks that are free already;
    a worker that frees blocks only after their last step's end passes one that does nothing."""

    def __init__(
        self,
        device: int = 0,
        *,
        driver: Any = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Raises ConfigError without bindings, driver or such a device."""
        self.driver = driver or load_driver()
        self.device = device
        self._synchronize = synchronize
        self._lock = threading.Lock()
        self._handles: dict[Frame, Any] = {}  # physical allocations made so far
        try:
            self.call("cuInit", 0)
            self._device = self.call("cuDeviceGet", device)
            self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
            self.enter()
            self._properties = self._make_properties()
            minimum = self.driver.CUmemAllocationGranularity_flags
            self.frame_bytes = int(
                self.call(
                    "cuMemGetAllocationGranularity",
                    self._properties,
                    minimum.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                )
            )
        except (
            CudaError,
            RuntimeError,
        ) as error:  # RuntimeError: bindings without a driver's library
            raise ConfigError(f"CUDA device {device} cannot be used: {error}") from error

    def _make_properties(self) -> Any:
        properties = self.driver.CUmemAllocationProp()
        properties.type = self.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device
        return properties

    def reserve(self, nbytes: int) -> CudaRange:
        self.enter()
        try:
            address = self.call("cuMemAddressReserve", nbytes, self.frame_bytes, 0, 0)
        except CudaError as error:
            raise ConfigError(f"{nbytes} bytes of addresses cannot be reserved: {error}") from error
        return CudaRange(self, int(address), nbytes)

    def release(self, frames: Sequence[Frame]) -> None:
        self.enter()
        for frame in frames:
            with self._lock:
                handle = self._handles.pop(frame, None)
            if handle is not None:
                self.call("cuMemRelease", handle)

    def close(self) -> None:
        """Releases all physical memory and the context."""
        self.release(list(self._handles))
        self.enter()
        self.call("cuDevicePrimaryCtxRelease", self._device)

    # -- for its ranges

    def enter(self) -> None:
        """Any thread may map; each needs the context."""
        self.call("cuCtxSetCurrent", self._context)

    def handle(self, frame: Frame) -> Any:
        """The frame's physical allocation, made when it is first needed."""
        with self._lock:
            handle = self._handles.get(frame)
        if handle is None:  # nobody else has this frame: the state gives each to one page
            handle = self.call("cuMemCreate", self.frame_bytes, self._properties, 0)
            with self._lock:
                self._handles[frame] = handle
        return handle

    def access(self) -> Any:
        description = self.driver.CUmemAccessDesc()
        description.location = self._properties.location
        description.flags = self.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return description

    def synchronize(self) -> None:
        if self._synchronize is None:
            self.call("cuCtxSynchronize")
        else:
            self._synchronize()

    def call(self, name: str, *arguments: Any) -> Any:
        """One driver call's value. Raises CudaError."""
        result, *values = getattr(self.driver, name)(*arguments)
        if result != self.driver.CUresult.CUDA_SUCCESS:
            raise CudaError(name, result)
        return values[0] if values else None


class CudaRange:
    """A reserved range of device addresses."""

    def __init__(self, backing: CudaBacking, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._backing = backing
        self._mapped: set[int] = set()  # addresses of frames; only for `close`

    @property
    def memory(self) -> memoryview:
        raise ConfigError("a CUDA device's memory has no bytes for the host: use its address")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All bytes as one array, mapped or not."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def map(self, offsets: Sequence[int], span_bytes: int, frames: Sequence[Frame]) -> None:
        backing, size = self._backing, self._backing.frame_bytes
        backing.enter()
        places = self._places(offsets, span_bytes)
        done: list[int] = []
        try:
            for place, frame in zip(places, frames, strict=True):
                backing.call("cuMemMap", place, size, 0, backing.handle(frame), 0)
                done.append(place)
                self._mapped.add(place)
            for offset in offsets:
                start = self.address + offset
                backing.call("cuMemSetAccess", start, span_bytes, [backing.access()], 1)
        except CudaError as error:
            self._take_away(done)
            raise MappingFailed(str(error)) from error

    def unmap(self, offsets: Sequence[int], span_bytes: int, frames: Sequence[Frame]) -> None:
        self._backing.enter()
        self._backing.synchronize()
        self._take_away(self._places(offsets, span_bytes))

    def close(self) -> None:
        """Unmaps what is still mapped and gives the addresses back."""
        self._backing.enter()
        with contextlib.suppress(CudaError):  # an error of somebody's kernel: told where it is used
            self._backing.synchronize()
        self._take_away(list(self._mapped))
        self._backing.call("cuMemAddressFree", self.address, self.nbytes)

    def _places(self, offsets: Sequence[int], span_bytes: int) -> list[int]:
        """The address of each frame of the spans."""
        size = self._backing.frame_bytes
        starts = [self.address + offset for offset in offsets]
        return [place for start in starts for place in range(start, start + span_bytes, size)]

    def _take_away(self, places: Sequence[int]) -> None:
        for place in places:
            self._backing.call("cuMemUnmap", place, self._backing.frame_bytes)
            self._mapped.discard(place)
