"""Whatever holds memory, as writable bytes: numpy arrays, memoryviews, mmap, ctypes, torch tensors.

Knows tensors by their shape only (`data_ptr`, `nbytes`); torch is not imported.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@runtime_checkable
class TensorLike(Protocol):
    """The part of torch.Tensor that tells where its memory is."""

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
    """All of its bytes, format 'B'; keeps the buffer alive.

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
        raise InvalidRequest(
            f"a tensor on {device} cannot be registered: stage it in pinned host memory"
        )
    if not tensor.is_contiguous() or not tensor.nbytes:
        raise InvalidRequest("a tensor to register must be contiguous and not empty")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined] # the tensor lives as long as the view
    return memoryview(memory).cast("B")
