"""vLLM's KV memory as the store and other servers reach it: in place on the host, or copied through pinned host memory.

A block is lent for reading or writing as a slot in registered host memory. Memory of a CUDA device is copied by streams
of its own, after the step that computed it and before the step that needs it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import numpy as np
import torch

from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.protocol.errors import ConfigError
from moonserve.transfer import Segment, TransferEngine
from moonserve.vllm.kv.cache_groups import CacheGroup

_libc = ctypes.CDLL(None)
_libc.mremap.argtypes = [*[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_size_t
_MREMAP_MAYMOVE_FIXED = 3
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
SHARED_BYTES = 64 << 20
"""From this size on, allocators give memory pages of its own."""


class KvMemory(Protocol):
    """Lends blocks. Thread-safe; the lent slots are valid within the block of the `with` statement."""

    def step_computed(self) -> None:
        """Notes that all work of the step is submitted. Called by vLLM's thread."""

    @contextmanager
    def reading(self, group: CacheGroup, block_ids: Sequence[int]) -> Iterator[BufferSlots]:
        """Lends the content of blocks that computed steps have filled."""

    @contextmanager
    def writing(self, group: CacheGroup, block_ids: Sequence[int]) -> Iterator[BufferSlots]:
        """Lends memory for the content of blocks. They have it when the `with` statement ends without an error."""


class HostMemory:
    """Memory of the host, which vLLM computes in: nothing is copied."""

    def __init__(self, engine: TransferEngine, memory: torch.Tensor) -> None:
        """`memory`: all bytes of the KV cache, which are 0 and not used yet."""
        place = memory.data_ptr(), memory.numel() * memory.element_size()
        self._segment, self._begin = _share(engine, *place) or (engine.register(memory, readable=True), 0)
        threading.Thread(target=self._fault_in, args=place, daemon=True).start()  # 2 to 4 GB/s

    def _fault_in(self, address: int, nbytes: int) -> None:
        use_huge_pages(address, nbytes)
        if self._segment.memory is not None:  # the mapping through which blocks are copied
            with suppress(OSError):  # no memory left: as if this had not been tried
                self._segment.memory.populate(0, self._segment.nbytes)

    def step_computed(self) -> None:
        """Nothing to do: the step has ended."""

    @contextmanager
    def reading(self, group: CacheGroup, block_ids: Sequence[int]) -> Iterator[BufferSlots]:
        yield BufferSlots.pages(self._segment, group.offsets(block_ids) + self._begin, group.page_bytes)

    writing = reading


class StagedMemory:
    """Memory of a device, copied through host memory that the device can reach directly."""

    def __init__(self, engine: TransferEngine, memory: torch.Tensor) -> None:
        """`memory`: all bytes of the KV cache, int8 [nbytes]."""
        self._engine = engine
        self._memory = memory
        self._is_cuda = memory.device.type == "cuda"
        self._computed: torch.cuda.Event | None = None

    def step_computed(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._memory.device))
            self._computed = event

    @contextmanager
    def reading(self, group: CacheGroup, block_ids: Sequence[int]) -> Iterator[BufferSlots]:
        with self._staged(group, len(block_ids)) as (slots, host), self._stream() as stream:
            if stream is not None and self._computed is not None:
                stream.wait_event(self._computed)
            for page, staged in zip(self._pages(group), self._staged_pages(group, host), strict=True):
                staged.copy_(page[self._indices(block_ids)], non_blocking=True)
            if stream is not None:
                stream.synchronize()
            yield slots

    @contextmanager
    def writing(self, group: CacheGroup, block_ids: Sequence[int]) -> Iterator[BufferSlots]:
        with self._staged(group, len(block_ids)) as (slots, host), self._stream() as stream:
            yield slots
            for page, staged in zip(self._pages(group), self._staged_pages(group, host), strict=True):
                page[self._indices(block_ids)] = staged.to(self._memory.device, non_blocking=True)
            if stream is not None:
                stream.synchronize()

    def _pages(self, group: CacheGroup) -> list[torch.Tensor]:
        """Returns each layer's pages, int8 [blocks, bytes of a page], in the device's memory."""
        nbytes = self._memory.numel()
        return [
            self._memory.as_strided(
                ((nbytes - page.offset - page.nbytes) // page.stride + 1, page.nbytes), (page.stride, 1), page.offset
            )
            for page in group.pages
        ]

    def _staged_pages(self, group: CacheGroup, host: torch.Tensor) -> list[torch.Tensor]:
        return list(host.split(group.page_bytes, dim=1))

    def _indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._memory.device)

    @contextmanager
    def _staged(self, group: CacheGroup, count: int) -> Iterator[tuple[BufferSlots, torch.Tensor]]:
        """Lends host memory for blocks, as slots and as int8 [blocks, bytes of a block]."""
        segment = self._engine.allocate(count * group.block_bytes, readable=True)
        try:
            with self._pinned(segment):
                begins = np.cumsum([0, *group.page_bytes[:-1]])
                offsets = np.arange(count).reshape(-1, 1) * group.block_bytes + begins
                host = torch.frombuffer(segment.buffer, dtype=torch.int8, count=count * group.block_bytes)
                yield BufferSlots.pages(segment, offsets, group.page_bytes), host.reshape(count, group.block_bytes)
        finally:
            self._engine.deregister(segment)

    @contextmanager
    def _pinned(self, segment: Segment) -> Iterator[None]:
        if not self._is_cuda:
            yield
            return
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(segment.base, segment.nbytes, 0))
        try:
            yield
        finally:
            runtime.cudaHostUnregister(segment.base)

    @contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream | None]:
        if not self._is_cuda:
            yield None
            return
        stream = torch.cuda.Stream(self._memory.device)
        with torch.cuda.stream(stream):
            yield stream


def _share(engine: TransferEngine, address: int, nbytes: int) -> tuple[Segment, int] | None:
    """Replaces the pages of vLLM's memory by shared ones, which processes of this host map: 49 MB are read in 2.4 ms
    instead of 8.4 (`process_vm_readv`). Returns their segment and where the memory begins in it; None if the memory may
    have pages in common with other memory, or if the system refuses."""
    if nbytes < SHARED_BYTES or "shm" not in engine.options.transports:
        return None
    first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    aligned = first % _HUGE_PAGE  # so that huge pages of the file are huge pages here
    try:
        elastic = "rdma" not in engine.options.transports
        segment = engine.allocate(aligned + end - first, readable=True, elastic=elastic)
    except ConfigError:
        return None
    begin = segment.base + aligned
    for edge in (0, end - first - mmap.PAGESIZE):  # has the allocator's own data beside the memory
        ctypes.memmove(begin + edge, first + edge, mmap.PAGESIZE)
    if _libc.mremap(begin, 0, end - first, _MREMAP_MAYMOVE_FIXED, first) != first:  # a second mapping of these pages
        engine.deregister(segment)
        return None
    return segment, aligned + address - first


def use_huge_pages(address: int, nbytes: int) -> None:
    """Puts memory into huge pages where the kernel can (from 6.1): others read it a fifth faster. Keeps its content."""
    begin, end = -(-address // _HUGE_PAGE) * _HUGE_PAGE, (address + nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if begin < end:
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def kv_memory(engine: TransferEngine, memory: torch.Tensor) -> KvMemory:
    return HostMemory(engine, memory) if memory.device.type == "cpu" else StagedMemory(engine, memory)
