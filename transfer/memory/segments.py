"""Local memory registered with the engine: allocation, registration and reference counts.

A segment that a batch or a window uses cannot be deregistered, and ids are never reused. Knows no peers, and of tensors
only where they are (`data_ptr`, `nbytes`); torch is not imported.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from moonserve.protocol.errors import InvalidRequest
from moonserve.transfer.memory.data_plane import address_of, data_plane
from moonserve.transfer.memory.memfd import OwnedMemory
from moonserve.transfer.paths.hardware_discovery import location_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@runtime_checkable
class TensorLike(Protocol):
    """The part of torch.Tensor's interface that tells where its memory is."""

    @property
    def device(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...


if TYPE_CHECKING:
    Registrable = WriteableBuffer | TensorLike
else:
    Registrable = object


def writable(buffer: Registrable) -> memoryview:
    """Returns a view of all bytes of `buffer`, format 'B', that keeps the buffer alive.

    Raises InvalidRequest for memory that is read-only, not contiguous, empty or on a device.
    """
    if isinstance(buffer, TensorLike):
        return _tensor_bytes(buffer)
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidRequest(f"a {type(buffer).__name__} has no memory to register") from error
    if view.readonly or not view.contiguous or not view.nbytes:
        raise InvalidRequest("memory to register must be writable, contiguous and not empty")
    return view.cast("B")


def _tensor_bytes(tensor: TensorLike) -> memoryview:
    if (device := str(tensor.device)) != "cpu":
        raise InvalidRequest(f"a tensor on {device} cannot be registered: stage it in pinned host memory")
    if not tensor.is_contiguous() or not tensor.nbytes:
        raise InvalidRequest("a tensor to register must be contiguous and not empty")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined] # keeps the tensor alive as long as the view
    return memoryview(memory).cast("B")


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """Description of a segment for peers."""

    segment_id: int
    nbytes: int
    location: str
    readable: bool
    name: str = ""


@dataclass(slots=True, eq=False, repr=False)
class Segment:
    """One registered memory region."""

    segment_id: int
    buffer: memoryview
    """Writable memory of the segment, format 'B'."""
    location: str
    """Location in this machine, "cpu:<NUMA node>"; empty if unknown."""
    readable: bool
    """True if peers may READ it."""
    name: str
    memory: OwnedMemory | None
    """Memory that peers on this host can map; None for memory that the caller provided."""
    base: int = field(init=False)
    """Address of the first byte."""
    nbytes: int = field(init=False)
    native: int = field(init=False)
    """Address of its `LocalMemory` (inline_copies.h)."""
    users_address: int = field(init=False)
    """Address of its number of users; `CLOSED` once it is deregistered."""
    _native: Any = field(init=False)

    def __post_init__(self) -> None:
        self.base, self.nbytes = address_of(self.buffer), self.buffer.nbytes
        self._native = (ctypes.c_int64 * 3)(self.base, self.nbytes)
        self.native = ctypes.addressof(self._native)
        self.users_address = self.native + 16

    @property
    def num_users(self) -> int:
        """Number of batches in flight, open windows and READs in the threads of callers."""
        return int(self._native[2])

    def __repr__(self) -> str:
        return f"Segment({self.segment_id}, {self.nbytes} bytes at {self.location})"


class SegmentTable:
    """All segments of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._native = data_plane().brief
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._segments)

    def add(
        self,
        view: memoryview,
        location: str | None = None,
        *,
        readable: bool,
        name: str = "",
        memory: OwnedMemory | None = None,
    ) -> Segment:
        """Adds a segment over writable memory. `location` None = it is looked up."""
        if location is None:
            location = location_of(address_of(view))
        with self._lock:
            segment = Segment(self._next_id, view, location, readable, name, memory)
            self._next_id += 1
            self._segments[segment.segment_id] = segment
        return segment

    def deregister(self, segment: Segment) -> None:
        """Removes a segment. Raises InvalidRequest while a batch or a window uses it."""
        with self._lock:
            self._require(segment)
            if not self._native.segment_close_if_unused(segment.native):
                raise InvalidRequest(f"{segment} is in use by {segment.num_users} batches/windows")
            del self._segments[segment.segment_id]
        if segment.memory is not None:
            segment.memory.mark_dead()

    def find(self, segment_id: int) -> Segment:
        """Returns the segment. Raises InvalidRequest for an id that is not registered."""
        segment = self._segments.get(segment_id)
        if segment is None:
            raise InvalidRequest(f"segment {segment_id} is not registered")
        return segment

    def infos(self) -> list[SegmentInfo]:
        with self._lock:
            segments = list(self._segments.values())
        return [SegmentInfo(each.segment_id, each.nbytes, each.location, each.readable, each.name) for each in segments]

    def is_registered(self, segment: Segment) -> bool:
        return self._segments.get(segment.segment_id) is segment

    def hold(self, segments: Iterable[Segment]) -> None:
        """Counts a user of each segment. Raises InvalidRequest, and counts none, if one is not registered here."""
        with self._lock:
            for segment in segments:
                self._require(segment)
            for segment in segments:
                self._native.segment_hold(segment.native)

    def release(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._native.segment_release(segment.native)

    def close(self) -> list[Segment]:
        """Removes and returns all segments. Views that callers still hold stay valid."""
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        for segment in segments:
            if segment.memory is not None:
                segment.memory.mark_dead()
        return segments

    def _require(self, segment: Segment) -> None:
        if not self.is_registered(segment):
            raise InvalidRequest(f"{segment} is not registered with this engine")
