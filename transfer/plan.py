"""From a batch's transfers to the moves that carry them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.errors import InvalidRequest, MoonserveError
from transfer.base import Move, Op, Transfer
from transfer.frames import MAX_ROWS

_LIMIT = 1 << 62
"""Keeps sums of what is checked later within 64 bits."""


def by_address(transfers: Sequence[Transfer]) -> dict[str, list[int]]:
    """Indices of the transfers for each peer."""
    parts: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        address = transfer.remote.address
        if address in parts:
            parts[address].append(index)
        else:
            parts[address] = [index]
    return parts


def moves(
    transfers: Sequence[Transfer], indices: Iterable[int]
) -> tuple[list[Move], dict[int, MoonserveError]]:
    """Few moves with neighbouring runs joined, and the errors of transfers that cannot be right."""
    planned: list[Move] = []
    open_moves: dict[tuple[Op, int, int, int | None], Move] = {}
    errors: dict[int, MoonserveError] = {}
    for index in indices:
        # Runs once per piece of KV: no calls on the common path.
        transfer = transfers[index]
        local, length = transfer.local_offset, transfer.length
        remote, segment = transfer.remote_offset, transfer.local
        if local < 0 or length < 0 or local + length > segment.nbytes or not 0 <= remote < _LIMIT:
            errors[index] = _out_of_bounds(transfer)
            continue
        key = (transfer.op, segment.segment_id, transfer.remote.segment_id, transfer.window_id)
        move = open_moves.get(key)
        if move is None or len(move.rows) >= MAX_ROWS:
            move = open_moves[key] = _move_for(transfer)
            planned.append(move)
        move.indices.append(index)
        rows = move.rows
        if rows:
            last_remote, last_local, last_length = rows[-1]
            if last_remote + last_length == remote and last_local + last_length == local:
                rows[-1] = (last_remote, last_local, last_length + length)
                continue
        rows.append((remote, local, length))
    return planned, errors


def _out_of_bounds(transfer: Transfer) -> InvalidRequest:
    return InvalidRequest(
        f"out of bounds: {transfer.length} bytes at {transfer.local_offset} of {transfer.local}, "
        f"at {transfer.remote_offset} of the remote segment"
    )


def _move_for(transfer: Transfer) -> Move:
    return Move(transfer.op, transfer.local, transfer.remote.segment_id, transfer.window_id)
