"""From a batch's transfers to the moves that carry them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.errors import InvalidRequest, MoonserveError
from transfer.base import Move, Op, Transfer
from transfer.frames import MAX_ROWS


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
        transfer = transfers[index]
        if (error := _fault(transfer)) is not None:
            errors[index] = error
            continue
        key = (
            transfer.op,
            transfer.local.segment_id,
            transfer.remote.segment_id,
            transfer.window_id,
        )
        move = open_moves.get(key)
        if move is None or len(move.rows) >= MAX_ROWS:
            move = open_moves[key] = _move_for(transfer)
            planned.append(move)
        move.indices.append(index)
        _append(move, transfer)
    return planned, errors


def _fault(transfer: Transfer) -> InvalidRequest | None:
    start, length = transfer.local_offset, transfer.length
    if start < 0 or length < 0 or start + length > transfer.local.nbytes:
        return InvalidRequest(f"({start}, {length}) is out of bounds of {transfer.local}")
    if not 0 <= transfer.remote_offset < 1 << 62:
        return InvalidRequest(f"remote offset {transfer.remote_offset} is out of bounds")
    if transfer.window_id is None and transfer.op is Op.WRITE:
        return InvalidRequest("a WRITE needs a window")
    return None


def _move_for(transfer: Transfer) -> Move:
    return Move(transfer.op, transfer.local, transfer.remote.segment_id, transfer.window_id)


def _append(move: Move, transfer: Transfer) -> None:
    remote, local, length = transfer.remote_offset, transfer.local_offset, transfer.length
    if move.rows:
        last_remote, last_local, last_length = move.rows[-1]
        if last_remote + last_length == remote and last_local + last_length == local:
            move.rows[-1] = (last_remote, last_local, last_length + length)
            return
    move.rows.append((remote, local, length))
