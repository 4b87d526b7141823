"""Attention for CPUs in C++ (`paged.cpp`, and `quantised.cpp` over a quantised pool): K and V are read where they lie,
nothing is gathered or padded.

Makes a step's plan for the library and calls it; `protocol.native` compiles it. Single tokens are cut into pieces of
what they see and prompts into tiles of tokens; threads share pieces, tiles and KV heads, and no result depends on how.
The step's own K and V are read from the pool, too.
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
from engine.kernels.compiling import FLAGS, load_kernels
from engine.kernels.library import Crew
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
    """`address` is that of a `Plan` of paged.h, which lives as long as this."""

    address: int
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
        pieces: list[tuple[int, int, int, int]] = []  # `Piece` of paged.h
        singles: list[tuple[int, int, int]] = []  # `Single`
        tiles: list[npt.NDArray[np.int64]] = []  # `Tile`
        row = table = 0
        for span in spans:
            if span.end - span.start == 1:
                own = pieces_of(span.end, window)
                singles.append((row, len(pieces), len(own)))
                pieces += [(row, table, first, end) for first, end in own]
            else:
                tiles.append(self._tiles(span, row, table))
            row += span.end - span.start
            table += len(span.blocks)
        return self._call(row, window, tables, pieces, singles, tiles)

    def _tiles(self, span: Span, row: int, table: int) -> npt.NDArray[np.int64]:
        """The longest first, so that threads end together."""
        num_tokens = span.end - span.start
        firsts = np.arange(0, num_tokens, self._tile_tokens)[::-1]
        tiles = np.empty((len(firsts), 4), dtype=np.int64)
        tiles[:, 0] = row + firsts
        tiles[:, 1] = np.minimum(num_tokens - firsts, self._tile_tokens)
        tiles[:, 2] = span.start + firsts
        tiles[:, 3] = table
        return tiles

    def _call(
        self,
        num_rows: int,
        window: int | None,
        tables: npt.NDArray[np.int64],
        pieces: list[tuple[int, int, int, int]],
        singles: list[tuple[int, int, int]],
        tiles: list[npt.NDArray[np.int64]],
    ) -> NativePlan:
        geometry = self._geometry
        arrays = (
            np.ascontiguousarray(tables, dtype=np.int64),
            np.array(pieces, dtype=np.int64),
            np.array(singles, dtype=np.int64),
            np.concatenate(tiles) if tiles else np.empty(0, dtype=np.int64),
            np.empty((len(pieces), geometry.num_heads, geometry.head_dim + 2), dtype=np.float32),
        )
        at = [array.ctypes.data for array in arrays]
        call = _Call(
            self._block_size,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            self._pool.slot_stride,
            _NO_WINDOW if window is None else window,
            self._crew.address,
            at[0],
            at[1],
            len(pieces),
            at[2],
            len(singles),
            at[3],
            len(arrays[3]),
            at[4],
            geometry.head_dim**-0.5 * math.log2(math.e),
        )
        return NativePlan(ctypes.addressof(call), num_rows, (call, *arrays))

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
        self._kernel(
            queries.data_ptr(),
            queries.stride(0),
            self._keys[layer],
            self._values[layer],
            output.data_ptr(),
            plan.address,
        )
        return output


def _kernel_of(pool: KvPool, cache_folder: Path | None) -> tuple[ctypes.CDLL, str]:
    """The library for such a pool, and the function's name in it."""
    if not pool.layout.is_quantised:
        return load_kernels(_SOURCE, cache_folder), f"attend_{pool.dtype}"
    types = f"-DQUERIES={_CPP_TYPES[pool.dtype]}", f"-DPOOL={_CPP_TYPES[pool.layout.dtype]}"
    return load_kernels(_QUANTISED, cache_folder, flags=(*FLAGS, *types)), "attend"


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
