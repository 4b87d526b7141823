"""Messages that no honest peer would send: every field of a protobuf message at its edges, from its descriptor.

Names, keys and numbers that the cluster knows are among them, since a lie is told best beside the truth.
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_MAX_DEPTH = 4

_WORDS = st.one_of(
    st.sampled_from(["", "prefill-0", "decode-0", "store-0", "gateway-0", "conductor", "127.0.0.1:1", "host"]),
    st.sampled_from(["x" * 5_000, "../../etc/passwd", "lean://127.0.0.1:1", "\0", "ünïcödé", "{}"]),
    st.text(max_size=12),
)
_BYTES = st.one_of(
    st.sampled_from([b"", bytes(16), b"\1" * 16, b"short", bytes(65 * 1024), b"\xff" * 32]), st.binary(max_size=40)
)
_FLOATS = st.one_of(st.sampled_from([0.0, -1.0, 1e-300, 1e308, math.inf, -math.inf, math.nan]), st.floats(0, 10))


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    edges = {low, high, 0, 1, 2, 31, 32, 4096, 65536, 1 << 20, 1 << 31, 1 << 62, -1, high - 1}
    return st.sampled_from(sorted(n for n in edges if low <= n <= high)) | st.integers(0, 100)


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _whole(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: _whole(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: _whole(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: _whole(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from([0.0, -1.0, 1.0, math.inf, math.nan]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 5) | st.just(17),
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Any message of that type."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.integers(0, 3)):  # a quarter is left out
            continue
        if field.message_type is not None and depth == _MAX_DEPTH:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                _append(draw, message, field, depth)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type, depth + 1)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


def _append(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None:
        values.add().CopyFrom(draw(messages(field.message_type, depth + 1)))
    else:
        values.append(draw(_scalar(field)))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _WORDS
    return _SCALARS[field.cpp_type]
