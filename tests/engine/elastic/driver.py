"""The part of CUDA's driver API that `engine.elastic.cuda` uses, in memory.

It keeps to what NVIDIA documents: addresses are reserved before they are mapped and freed only when nothing is mapped
in them, one mapping per address, access is set on what is mapped, a mapping is taken away as it was made, physical
memory is released once. What this test double adds: a physical allocation mapped in two places is refused too.
Anything else gets CUDA_ERROR_INVALID_VALUE.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

GRANULARITY = 4096
OK, INVALID, OUT_OF_MEMORY = "CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY"


class MemoryDriver:
    """A device with `num_frames` frames of physical memory."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.calls: Counter[str] = Counter()
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # address → handle
        self.accessible: set[int] = set()
        self.context: threading.local = threading.local()
        self._next_address = 1 << 40
        self._new_handles = itertools.count(1)
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            with self._lock:
                self.calls[name] += 1
        return object.__getattribute__(self, name)

    # -- device and context

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace()

    def cuInit(self, flags: int) -> tuple[str]:
        return (OK if flags == 0 else INVALID,)

    def cuDeviceGet(self, ordinal: int) -> tuple[str, Any]:
        return (OK, "device 0") if ordinal == 0 else ("CUDA_ERROR_INVALID_DEVICE", None)

    def cuDevicePrimaryCtxRetain(self, _device: Any) -> tuple[str, Any]:
        return OK, "primary"

    def cuDevicePrimaryCtxRelease(self, _device: Any) -> tuple[str]:
        return (OK,)

    def cuCtxSetCurrent(self, context: Any) -> tuple[str]:
        self.context.current = context
        return (OK,)

    def cuCtxSynchronize(self) -> tuple[str]:
        return (self._in_context(),)

    def cuMemGetAllocationGranularity(self, _properties: Any, _flag: int) -> tuple[str, int]:
        return self._in_context(), GRANULARITY

    # -- memory

    def cuMemAddressReserve(
        self, nbytes: int, alignment: int, _address: int, flags: int
    ) -> tuple[str, int]:
        with self._lock:
            if nbytes % GRANULARITY or alignment % GRANULARITY or flags:
                return INVALID, 0
            address = self._next_address
            self._next_address += nbytes + GRANULARITY
            self.reserved[address] = nbytes
            return self._in_context(), address

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[str]:
        with self._lock:
            if self.reserved.get(address) != nbytes or self._mapped_in(address, nbytes):
                return (INVALID,)
            del self.reserved[address]
            return (OK,)

    def cuMemCreate(self, nbytes: int, _properties: Any, flags: int) -> tuple[str, int]:
        with self._lock:
            if nbytes != GRANULARITY or flags:
                return INVALID, 0
            if len(self.handles) == self.num_frames:
                return OUT_OF_MEMORY, 0
            handle = next(self._new_handles)
            self.handles.add(handle)
            return self._in_context(), handle

    def cuMemRelease(self, handle: int) -> tuple[str]:
        with self._lock:
            if handle not in self.handles:
                return (INVALID,)
            self.handles.remove(handle)
            return (OK,)

    def cuMemMap(
        self, address: int, nbytes: int, offset: int, handle: int, flags: int
    ) -> tuple[str]:
        with self._lock:
            is_reserved = any(a <= address < a + n for a, n in self.reserved.items())
            is_whole = nbytes == GRANULARITY and address % GRANULARITY == offset == flags == 0
            is_new = address not in self.mapped and handle not in self.mapped.values()
            if not (is_reserved and is_whole and is_new and handle in self.handles):
                return (INVALID,)
            self.mapped[address] = handle
            return (self._in_context(),)

    def cuMemSetAccess(
        self, address: int, nbytes: int, descriptions: list[Any], count: int
    ) -> tuple[str]:
        with self._lock:
            places = range(address, address + nbytes, GRANULARITY)
            if count != len(descriptions) or not set(places) <= set(self.mapped):
                return (INVALID,)
            self.accessible.update(places)
            return (self._in_context(),)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[str]:
        with self._lock:
            if nbytes != GRANULARITY or address not in self.mapped:
                return (INVALID,)
            del self.mapped[address]
            self.accessible.discard(address)
            return (OK,)

    def _mapped_in(self, address: int, nbytes: int) -> bool:
        return any(address <= place < address + nbytes for place in self.mapped)

    def _in_context(self) -> str:
        has_context = getattr(self.context, "current", None) == "primary"
        return OK if has_context else "CUDA_ERROR_INVALID_CONTEXT"
