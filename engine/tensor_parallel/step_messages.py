"""Wire format of the steps that rank 0 sends to other ranks: one message of int64 words over a socket.

A message holds the final layout of a step, so that it is computed only once. Both ends are processes of one worker and
trust each other.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from moonserve.engine.kernels import Span, Step
from moonserve.engine.tensor_parallel.collectives import RANK_TIMEOUT_S
from moonserve.protocol.errors import PeerLost

Words = npt.NDArray[np.int64]

_WORD_BYTES = 8
# A receiver polls for this long before it sleeps. Decode steps of small models follow each other faster, and waking a
# thread costs a tenth of such a step.
_SPIN_S = 0.0003
_FIELDS = 8  # of the header, below
_SPAN_FIELDS = 4  # start, end, number of blocks, prompt_end


def encode(step: Step, dirty: torch.Tensor | None) -> bytes:
    """Encodes `step`, which has no hidden states, and the slots to clear."""
    assert step.hidden is None, "ranks begin with tokens"
    spans = [(span.start, span.end, len(span.blocks), span.prompt_end) for span in step.spans]
    parts = [
        step.token_ids.numpy(),
        step.positions.numpy(),
        step.slots.numpy(),
        np.array(spans, dtype=np.int64).flatten(),
        *(span.blocks for span in step.spans),
        _optional(step.rows),
        _optional(dirty),
    ]
    sizes = (len(parts[-2]), len(parts[-1]))
    num_blocks = sum(len(span.blocks) for span in step.spans)
    header = (
        len(step.token_ids),
        step.longest,
        len(step.spans),
        num_blocks,
        step.rows is not None,
        sizes[0],
        dirty is not None,
        sizes[1],
    )
    return np.concatenate([np.array(header, dtype=np.int64), *parts]).tobytes()


def decode(message: bytes | bytearray) -> tuple[Step, torch.Tensor | None]:
    """Decodes a message of `encode`. The tensors are views of the message."""
    words = np.frombuffer(message, dtype=np.int64)
    tokens, longest, num_spans, num_blocks, has_rows, rows, has_dirty, dirty = words[:_FIELDS].tolist()
    sizes = (tokens, tokens, tokens, _SPAN_FIELDS * num_spans, num_blocks, rows, dirty)
    ends = list(accumulate(sizes, initial=_FIELDS))
    parts = [words[first:end] for first, end in pairwise(ends)]
    step = Step(
        token_ids=torch.from_numpy(parts[0]),
        positions=torch.from_numpy(parts[1]),
        longest=longest,
        slots=torch.from_numpy(parts[2]),
        spans=_spans(parts[3].reshape(-1, _SPAN_FIELDS), parts[4]),
        rows=torch.from_numpy(parts[5]) if has_rows else None,
    )
    return step, torch.from_numpy(parts[6]) if has_dirty else None


def _optional(tensor: torch.Tensor | None) -> Words:
    return np.empty(0, dtype=np.int64) if tensor is None else tensor.numpy()


def _spans(rows: Words, blocks: Words) -> list[Span]:
    spans = []
    place = 0
    for start, end, count, prompt_end in rows.tolist():
        spans.append(Span(start, end, blocks[place : place + count], prompt_end))
        place += count
    return spans


# -- over a socket


def send(sockets: Sequence[socket.socket], message: bytes) -> None:
    """Sends the message to all sockets. Raises PeerLost if an end is closed or takes no data for `RANK_TIMEOUT_S`."""
    framed = len(message).to_bytes(_WORD_BYTES, "little") + message
    for each in sockets:
        try:
            each.sendall(framed)
        except OSError as error:
            raise PeerLost(f"tensor parallelism: a rank does not receive steps: {error}") from error


def receive(connection: socket.socket) -> bytearray | None:
    """Returns the next message, or None if the other end was closed. Polls for `_SPIN_S` before it sleeps."""
    _spin(connection)
    length = _read(connection, _WORD_BYTES)
    return None if length is None else _read(connection, int.from_bytes(length, "little"))


def _spin(connection: socket.socket) -> None:
    """Polls until data has arrived, for at most `_SPIN_S`."""
    give_up_at = time.perf_counter() + _SPIN_S
    while time.perf_counter() < give_up_at:
        with contextlib.suppress(BlockingIOError):
            connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return


def _read(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while len(view):
        try:
            got = connection.recv_into(view)
        except ConnectionResetError:
            return None
        if got == 0:
            return None
        view = view[got:]
    return data


def pair() -> tuple[socket.socket, socket.socket]:
    """Creates a connected pair of sockets: rank 0's end and the other rank's."""
    own, other = socket.socketpair()
    own.settimeout(RANK_TIMEOUT_S)
    return own, other
