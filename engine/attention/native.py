"""Attention for CPUs in C++ (`paged.cpp`, and `quantised.cpp` over a quantised pool): K and V are read where they lie,
nothing is gathered or padded.

Makes a step's plan for the library and calls it; `protocol.native` compiles it. Prompts are cut into tiles of tokens
and what an output token sees into pieces; threads share pieces, tiles and KV heads, and no result depends on how. The
step's own K and V are read from the pool, too.

A token of the prompt is in a tile and one of the output by itself, however many of them a step has: so output that is
computed again, where its worker was lost or its blocks were needed, has the bits that it had when it was decoded.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import Geometry, Span, singles_first
from engine.kernels.library import FLAGS, Crew, load_kernels
from engine.kv_pool import KvPool
from protocol.native import CompilerError

_SOURCE = Path(__file__).with_name("paged.cpp")
_QUANTISED = Path(__file__).with_name("quantised.cpp")
_CPP_TYPES = {"float32": "float", "bfloat16": "Bfloat16", "int8": "Int8", "fp8": "Fp8"}
# Limits of paged.h.
_MAX_HEADS = 128
_MAX_HEAD_DIM = 256
# A tile's tokens times the query heads of a KV head (MAX_ROWS of prefill.h).
_TILE_ROWS = 192
# Decode splits what a token sees into pieces of at least so many tokens, at most so many pieces. By length alone:
# threads and batch must not change a sum's order.
_PIECE_TOKENS = 256
_MAX_PIECES = 16
_SINGLES_AT_ONCE = 256
"""Output tokens whose pieces lie in memory together: as many as large batches have."""
_NO_WINDOW = 1 << 40


class _Call(ctypes.Structure):
    """`Plan` of paged.h."""

    _fields_ = (
        ("block_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("crew", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_int64),
        ("singles", ctypes.c_void_p),
        ("num_singles", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
        ("scale", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """`addresses` are those of `Plan`s of paged.h, which live as long as this."""

    addresses: tuple[int, ...]
    num_rows: int
    kept: tuple[object, ...]  # what the call points to


class NativePagedAttention:
    """`Attention` for CPUs. Raises CompilerError when it cannot be had for this model or on this machine."""

    name = "native"
    reads_whole_blocks = False

    def __init__(
        self,
        geometry: Geometry,
        pool: KvPool,
        cache_folder: Path | None,
        crew: Crew | None = None,
    ) -> None:
        _check_limits(geometry)
        self._geometry = geometry
        self._block_size = pool.layout.block_size
        self._tile_tokens = max(1, _TILE_ROWS * geometry.num_kv_heads // geometry.num_heads)
        self._keys = [piece.data_ptr() for piece in pool.keys]
        self._values = [piece.data_ptr() for piece in pool.values]
        self._pool = pool  # keeps the memory
        library, name = _kernel_of(pool, cache_folder)
        self._crew = Crew(library, torch.get_num_threads()) if crew is None else crew
        self._kernel = library[name]
        pointer = ctypes.c_void_p
        self._kernel.argtypes = [pointer, ctypes.c_int64, pointer, pointer, pointer, pointer]
        self._kernel.restype = None

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        return singles_first(lengths)

    def plan(self, spans: Sequence[Span], window: int | None) -> NativePlan:
        tables = np.concatenate([span.blocks for span in spans])
        output: list[tuple[int, int, int]] = []  # row, table, end of what it sees
        tiles: list[npt.NDArray[np.int64]] = []  # `Tile` of paged.h
        row = table = 0
        for span in spans:
            prompt_end = max(span.start, min(span.end, span.prompt_end))
            if span.start < prompt_end:
                tiles.append(self._tiles(span.start, prompt_end, row, table))
            offset = row - span.start
            output += [(offset + at, table, at + 1) for at in range(prompt_end, span.end)]
            row += span.end - span.start
            table += len(span.blocks)
        all_tiles = np.concatenate(tiles) if tiles else np.empty((0, 4), dtype=np.int64)
        return self._plan(row, window, tables, all_tiles, output)

    def _plan(
        self,
        num_rows: int,
        window: int | None,
        tables: npt.NDArray[np.int64],
        tiles: npt.NDArray[np.int64],
        output: Sequence[tuple[int, int, int]],
    ) -> NativePlan:
        """A call for the tiles and the first of the output; more of that has calls of its own, one after the other in
        the same memory."""
        geometry = self._geometry
        starts = range(0, max(1, len(output)), _SINGLES_AT_ONCE)
        parts = [_cut(output[start : start + _SINGLES_AT_ONCE], window) for start in starts]
        most = max(len(pieces) for pieces, _ in parts)
        partials = np.empty((most, geometry.num_heads, geometry.head_dim + 2), dtype=np.float32)
        tables = np.ascontiguousarray(tables, dtype=np.int64)
        calls = [
            self._call(window, tables, singles, pieces, tiles if index == 0 else tiles[:0], partials)
            for index, (pieces, singles) in enumerate(parts)
        ]
        addresses = tuple(map(ctypes.addressof, calls))
        return NativePlan(addresses, num_rows, (calls, tables, tiles, parts, partials))

    def _tiles(self, start: int, end: int, row: int, table: int) -> npt.NDArray[np.int64]:
        """Of the prompt's tokens [start, end); the longest first, so that threads end together."""
        firsts = np.arange(0, end - start, self._tile_tokens)[::-1]
        tiles = np.empty((len(firsts), 4), dtype=np.int64)
        tiles[:, 0] = row + firsts
        tiles[:, 1] = np.minimum(end - start - firsts, self._tile_tokens)
        tiles[:, 2] = start + firsts
        tiles[:, 3] = table
        return tiles

    def _call(
        self,
        window: int | None,
        tables: npt.NDArray[np.int64],
        singles: npt.NDArray[np.int64],
        pieces: npt.NDArray[np.int64],
        tiles: npt.NDArray[np.int64],
        partials: npt.NDArray[np.float32],
    ) -> _Call:
        """The arrays must live as long as it does."""
        geometry = self._geometry
        return _Call(
            self._block_size,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            self._pool.slot_stride,
            _NO_WINDOW if window is None else window,
            self._crew.address,
            tables.ctypes.data,
            pieces.ctypes.data,
            len(pieces),
            singles.ctypes.data,
            len(singles),
            tiles.ctypes.data,
            len(tiles),
            partials.ctypes.data,
            geometry.head_dim**-0.5 * math.log2(math.e),
        )

    def attend(
        self,
        layer: int,
        plan: NativePlan,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        geometry = self._geometry
        if queries.stride()[1:] != (geometry.head_dim, 1):
            queries = queries.contiguous()
        output = queries.new_empty(plan.num_rows, geometry.num_heads * geometry.head_dim)
        for address in plan.addresses:
            self._kernel(
                queries.data_ptr(),
                queries.stride(0),
                self._keys[layer],
                self._values[layer],
                output.data_ptr(),
                address,
            )
        return output


def _kernel_of(pool: KvPool, cache_folder: Path | None) -> tuple[ctypes.CDLL, str]:
    """The library for such a pool, and the function's name in it."""
    if not pool.layout.is_quantised:
        return load_kernels(_SOURCE, cache_folder), f"attend_{pool.dtype}"
    types = f"-DQUERIES={_CPP_TYPES[pool.dtype]}", f"-DPOOL={_CPP_TYPES[pool.layout.dtype]}"
    return load_kernels(_QUANTISED, cache_folder, flags=(*FLAGS, *types)), "attend"


def _cut(
    output: Sequence[tuple[int, int, int]], window: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`Piece`s and `Single`s of paged.h for these tokens (row, table, end of what each sees)."""
    pieces: list[tuple[int, int, int, int]] = []
    singles: list[tuple[int, int, int]] = []
    for row, table, end in output:
        own = pieces_of(end, window)
        singles.append((row, len(pieces), len(own)))
        pieces += [(row, table, first, last) for first, last in own]
    return np.array(pieces, dtype=np.int64), np.array(singles, dtype=np.int64)


def pieces_of(end: int, window: int | None) -> list[tuple[int, int]]:
    """What the token at `end` - 1 sees, cut at multiples of a length."""
    first = 0 if window is None else max(0, end - window)
    length = _PIECE_TOKENS * -(-(end - first) // (_PIECE_TOKENS * _MAX_PIECES))
    cuts = [first, *range((first // length + 1) * length, end, length), end]
    return list(pairwise(cuts))


def _check_limits(geometry: Geometry) -> None:
    for what, value, limit in (
        ("heads", geometry.num_heads, _MAX_HEADS),
        ("head_dim", geometry.head_dim, _MAX_HEAD_DIM),
    ):
        if value > limit:
            raise CompilerError(f"{what} {value} is above the kernel's limit of {limit}")
