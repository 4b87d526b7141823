"""Attention for CPUs in C++ (`attention.cpp`, and `quantised_attention.cpp` for a quantised pool), without gathering or
padding.

Plans a step for the library and calls it; `protocol.process.native_libraries` compiles it. Prompts are cut into tiles
of tokens, and the context of an output token into pieces. Threads share tiles, pieces and KV heads; results do not
depend on how. K and V of the step itself are also read from the pool.

Prompt tokens are computed in tiles and output tokens one by one, however many of them a step has. So output that is
recomputed, after the loss of a worker or a preemption, has the same bits as when it was decoded.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moonserve.engine.kernels import Geometry, Span, singles_first
from moonserve.engine.kernels.native_library import FLAGS, ThreadPool, load_kernels
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.protocol.process.native_libraries import CompilerError, c_fields

_SOURCE = Path(__file__).parent / "native" / "attention" / "attention.cpp"
_QUANTISED, _LATENT = (_SOURCE.with_name(f"{kind}_attention.cpp") for kind in ("quantised", "latent"))
_CPP_TYPES = {"float32": "float", "bfloat16": "Bfloat16", "int8": "Int8", "fp8": "Fp8"}
# Limits in plan.h.
_MAX_HEADS = 128
_MAX_HEAD_DIM = 256
_MAX_POOLED = 640
# Tokens of a tile times query heads per KV head (MAX_ROWS of prefill.h).
_TILE_ROWS = 192
# Decode splits the context of a token at multiples of a length of at least 256, chosen for about 16 pieces. The split
# depends on the context alone: threads and batch must not change the order of a sum.
_PIECE_TOKENS = 256
_MAX_PIECES = 16
_SINGLES_AT_ONCE = 256
"""Output tokens of one call, which bounds the memory of their pieces. Large batches have this many."""
_NO_WINDOW = 1 << 40


class _Call(ctypes.Structure):
    """C structure `Plan` of plan.h."""

    _fields_ = (
        *c_fields(ctypes.c_int64, "block_size heads kv_heads key_dim head_dim slot_stride window"),
        *c_fields(ctypes.c_void_p, "thread_pool tables pieces"),
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
    """A planned step. `addresses` point to `Plan`s of plan.h, which live as long as this object."""

    addresses: tuple[int, ...]
    num_rows: int
    kept: tuple[object, ...]  # owners of the memory that the calls point to


class NativePagedAttention:
    """`Attention` for CPUs. Raises CompilerError if it is not available for this model or on this machine."""

    name = "native"
    reads_whole_blocks = False

    def __init__(
        self, geometry: Geometry, pool: KvTensors, cache_folder: Path | None, thread_pool: ThreadPool | None = None
    ) -> None:
        _check_limits(geometry)
        self._geometry = geometry
        latents, size = geometry.latents, geometry.head_dim
        self._key_dim, self._value_dim = (size, size) if latents is None else (latents.pooled, latents.rank)
        self._scale = size**-0.5 if latents is None else latents.scale
        self._block_size = pool.layout.block_size
        self._tile_tokens = max(1, _TILE_ROWS * geometry.num_kv_heads // geometry.num_heads)
        self._keys = [piece.data_ptr() for piece in pool.keys]
        self._values = [piece.data_ptr() for piece in pool.values]
        self._sinks = [sinks * math.log2(math.e) for sinks in geometry.sinks]
        self._pool = pool  # keeps the pool's memory alive
        library, name = _kernel_of(pool, cache_folder, is_latent=latents is not None)
        self._thread_pool = ThreadPool(library, torch.get_num_threads()) if thread_pool is None else thread_pool
        self._kernel = library[name]
        pointer = ctypes.c_void_p
        self._kernel.argtypes = [pointer, ctypes.c_int64, pointer, pointer, pointer, pointer, pointer]
        self._kernel.restype = None

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        return singles_first(lengths)

    def plan(self, spans: Sequence[Span], window: int | None) -> NativePlan:
        """Plans one call for the tiles and the first output tokens, and further calls for more output tokens. The calls
        run one after another in the same memory."""
        output: list[tuple[int, int, int]] = []  # row, table, end of its context
        tiles: list[npt.NDArray[np.int64]] = []  # `Tile` of plan.h
        row = table = 0
        for span in spans:
            prompt_end = max(span.start, min(span.end, span.prompt_end))
            if span.start < prompt_end:
                tiles.append(self._tiles(span.start, prompt_end, row, table))
            offset = row - span.start
            output += [(offset + at, table, at + 1) for at in range(prompt_end, span.end)]
            row += span.end - span.start
            table += len(span.blocks)
        tables = np.ascontiguousarray(np.concatenate([span.blocks for span in spans]), dtype=np.int64)
        all_tiles = np.concatenate(tiles) if tiles else np.empty((0, 4), dtype=np.int64)
        starts = range(0, max(1, len(output)), _SINGLES_AT_ONCE)
        parts = [_cut(output[start : start + _SINGLES_AT_ONCE], window) for start in starts]
        most = max(len(pieces) for pieces, _ in parts)
        partials = np.empty((most, self._geometry.num_heads, self._value_dim + 2), dtype=np.float32)
        calls = [
            self._call(window, tables, singles, pieces, all_tiles if index == 0 else all_tiles[:0], partials)
            for index, (pieces, singles) in enumerate(parts)
        ]
        addresses = tuple(map(ctypes.addressof, calls))
        return NativePlan(addresses, row, (calls, tables, all_tiles, parts, partials))

    def _tiles(self, start: int, end: int, row: int, table: int) -> npt.NDArray[np.int64]:
        """Returns the tiles of prompt tokens [start, end), longest context first, so that threads end together."""
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
        """Creates a `Plan` of plan.h. The arrays must live as long as it does."""
        geometry = self._geometry
        return _Call(
            self._block_size,
            geometry.num_heads,
            geometry.num_kv_heads,
            self._key_dim,
            self._value_dim,
            self._pool.slot_stride,
            _NO_WINDOW if window is None else window,
            self._thread_pool.address,
            tables.ctypes.data,
            pieces.ctypes.data,
            len(pieces),
            singles.ctypes.data,
            len(singles),
            tiles.ctypes.data,
            len(tiles),
            partials.ctypes.data,
            self._scale * math.log2(math.e),
        )

    def attend(
        self, layer: int, plan: NativePlan, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if queries.stride()[1:] != (self._key_dim, 1):
            queries = queries.contiguous()
        output = queries.new_empty(plan.num_rows, self._geometry.num_heads * self._value_dim)
        for address in plan.addresses:
            self._kernel(
                queries.data_ptr(),
                queries.stride(0),
                self._keys[layer],
                self._values[layer],
                self._sinks[layer].data_ptr() if self._sinks else None,
                output.data_ptr(),
                address,
            )
        return output


def _kernel_of(pool: KvTensors, cache_folder: Path | None, *, is_latent: bool) -> tuple[ctypes.CDLL, str]:
    """Returns the library for the pool's dtypes and the name of the function in it."""
    if not pool.layout.is_quantised and not is_latent:
        return load_kernels(_SOURCE, cache_folder), f"attend_{pool.dtype}"
    types = f"-DQUERIES={_CPP_TYPES[pool.dtype]}", f"-DPOOL={_CPP_TYPES[pool.layout.dtype]}"
    return load_kernels(_LATENT if is_latent else _QUANTISED, cache_folder, flags=(*FLAGS, *types)), "attend"


def _cut(
    output: Sequence[tuple[int, int, int]], window: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the `Piece`s and `Single`s of plan.h for output tokens (row, table, end of context)."""
    pieces: list[tuple[int, int, int, int]] = []
    singles: list[tuple[int, int, int]] = []
    for row, table, end in output:
        own = split_context(end, window)
        singles.append((row, len(pieces), len(own)))
        pieces += [(row, table, first, last) for first, last in own]
    return np.array(pieces, dtype=np.int64), np.array(singles, dtype=np.int64)


def split_context(end: int, window: int | None) -> list[tuple[int, int]]:
    """Returns the context of the token at `end` - 1 as pieces (first, end), cut at multiples of a length."""
    first = 0 if window is None else max(0, end - window)
    length = _PIECE_TOKENS * -(-(end - first) // (_PIECE_TOKENS * _MAX_PIECES))
    cuts = [first, *range((first // length + 1) * length, end, length), end]
    return list(pairwise(cuts))


def _check_limits(geometry: Geometry) -> None:
    width = ("head_dim", geometry.head_dim, _MAX_HEAD_DIM)
    if geometry.latents is not None:
        width = ("kv_lora_rank + qk_rope_head_dim", geometry.latents.pooled, _MAX_POOLED)
    for what, value, limit in (("heads", geometry.num_heads, _MAX_HEADS), width):
        if value > limit:
            raise CompilerError(f"{what} {value} is above the kernel's limit of {limit}")
