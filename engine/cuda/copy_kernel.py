"""Copies blocks of K and V between the GPU's memory and mapped host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 32
"""Enough for the bus of an H100 (PCIe 5) in both directions; a full grid would keep the engine's kernels waiting."""
_TILE = 1024  # elements of 8 bytes, of K and of V, that a program copies at a time

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def copy_blocks(source: KeysAndValues, target: KeysAndValues, blocks: torch.Tensor) -> None:
    """Copies rows `blocks` [count] int64 of K and V, [blocks, …] and contiguous, to the same rows of `target`."""
    pieces = [_as_words(piece) for piece in (*source, *target)]
    size = pieces[0].shape[1]
    tiles = triton.cdiv(size, _TILE)
    programs = min(_PROGRAMS, len(blocks) * tiles)
    _copy_blocks[(programs,)](
        *pieces, blocks, len(blocks) * tiles, SIZE=size, TILES=tiles, TILE=_TILE, num_warps=4
    )  # fmt: skip


def _as_words(piece: torch.Tensor) -> torch.Tensor:
    """Returns the blocks of a piece as rows of the widest numbers that they can be divided into."""
    rows = piece.flatten(1)
    nbytes = rows.shape[1] * rows.element_size()
    return rows.view(next(dtype for dtype in (torch.int64, torch.int32, torch.int16) if nbytes % dtype.itemsize == 0))


@triton.jit(do_not_specialize=["count"])
def _copy_blocks(
    keys: tl.tensor, values: tl.tensor, to_keys: tl.tensor, to_values: tl.tensor, blocks: tl.tensor,
    count: tl.tensor, SIZE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        block = tl.load(blocks + index // TILES)
        places = (index % TILES) * TILE + tl.arange(0, TILE)
        inside = places < SIZE
        rows = block * SIZE + places
        tile_keys = tl.load(keys + rows, mask=inside)
        tile_values = tl.load(values + rows, mask=inside)
        tl.store(to_keys + rows, tile_keys, mask=inside)
        tl.store(to_values + rows, tile_values, mask=inside)
