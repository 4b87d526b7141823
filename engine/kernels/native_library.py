"""Python bindings of `engine/kernels/native/layers.cpp`: structures, functions and threads. Knows no tensors.

The structures must match the C++ field by field. `load_kernels` defines how all C++ code of the engine is compiled and
where its libraries are kept.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moonserve.engine.kernels.shared_cores import SharedCores
from moonserve.protocol.process.native_libraries import CompilerError, c_fields, load_library

# Only multiplications and additions may be fused, so that results do not depend on how a loop is cut. -ffast-math would
# reorder sums, and would make every thread of the process flush denormals once a library is loaded.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-pthread",
)


def load_kernels(
    source: Path,
    cache_folder: Path | None,
    compiling: Callable[[], None] | None = None,
    *,
    flags: Sequence[str] = FLAGS,
) -> ctypes.CDLL:
    """Loads a C++ library of the engine, compiled or taken from `cache_folder`. Raises CompilerError."""
    folder = None if cache_folder is None else cache_folder / "kernels"
    return load_library(source, flags, folder, compiling)


SOURCE = Path(__file__).parent / "native" / "layers.cpp"

Call = Callable[..., None]
"""A function of the library. It runs without the interpreter lock."""


class CMatrix(ctypes.Structure):
    """C structure `Matrix` of matrix_product.h."""

    _fields_ = (
        *c_fields(ctypes.c_void_p, "panels bias"),
        *c_fields(ctypes.c_int64, "words num_panels"),
        *c_fields(ctypes.c_void_p, "exponents outliers starts scales zeros mins"),
        *c_fields(ctypes.c_int64, "bits group inputs is_float"),
    )


class CMlp(ctypes.Structure):
    """C structure `Mlp` of layers.cpp."""

    _fields_ = (("gate_up", CMatrix), ("down", CMatrix))


class CLayer(ctypes.Structure):
    """C structure `Layer` of layers.cpp."""

    _fields_ = (
        *c_fields(CMatrix, "qkv o router queries latent_keys latent_values shared_gate_up shared_down"),
        ("mlps", ctypes.POINTER(CMlp)),
        *c_fields(ctypes.c_void_p, "input_norm qk_norm post_norm query_norm latent_norm corrections keys values"),
    )


class CModel(ctypes.Structure):
    """C structure `Model` of layers.cpp."""

    _fields_ = (
        *c_fields(ctypes.c_int64, "hidden_size heads kv_heads head_dim vocab_size"),
        *c_fields(ctypes.c_int64, "rank rotary plain value query_rank"),
        *c_fields(ctypes.c_int64, "experts per_token groups chosen_groups normalised is_grouped"),
        *c_fields(ctypes.c_double, "scaling alpha limit"),
        *c_fields(ctypes.c_int64, "layer_products slot_stride pool_format"),
        ("layers", ctypes.POINTER(CLayer)),
        ("lm_head", CMatrix),
        *c_fields(ctypes.c_void_p, "final_norm embedding thread_pool normed inner inputs gathered mixed shares chosen"),
        *c_fields(ctypes.c_void_p, "fused wide"),
        ("epsilon", ctypes.c_float),
    )


class CStep(ctypes.Structure):
    """C structure `Step` of layers.cpp."""

    _fields_ = (("tokens", ctypes.c_int64), *c_fields(ctypes.c_void_p, "positions slots cosines sines hidden heads"))


class LayersLibrary:
    """Compiled functions for one dtype, "float32" or "bfloat16". Raises CompilerError."""

    def __init__(
        self,
        dtype: str,
        folder: Path | None,
        compiling: Callable[[], None] | None = None,
        *,
        flags: Sequence[str] = FLAGS,
    ) -> None:
        self.library = load_kernels(SOURCE, folder, compiling, flags=flags)
        self._dtype = dtype
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self.embed = self.function("embed", pointer, pointer, pointer)
        self.project = self.function("project", pointer, pointer, count)
        self.finish = self.function("finish", pointer, pointer, count, pointer)
        self.output = self.function("output", pointer, pointer, count, pointer, pointer)
        self.feed = self.function("feed", pointer, pointer, count, pointer)
        self.logits = self.function("logits", pointer, pointer, pointer)
        self.count_exponents = self._plain("count_exponents", pointer, count, pointer)
        self.make_compact = self._plain("make_compact", pointer, count, count, pointer, pointer, pointer, pointer)

    @property
    def suits_many_rows(self) -> bool:
        """True if no other library on this machine multiplies more than a few rows faster."""
        return bool(self.library.suits_many_rows(self._dtype == "bfloat16"))

    @property
    def reads_compact(self) -> bool:
        """True if products accept compact weights (`engine.kernels.weight_packing`), which are faster then."""
        return bool(self.library.reads_compact(self._dtype == "bfloat16"))

    def function(self, name: str, *arguments: type[Any]) -> Call:
        """Returns the function `name` for the dtype; its result is void."""
        return self._plain(f"{name}_{self._dtype}", *arguments)

    def _plain(self, name: str, *arguments: type[Any]) -> Call:
        found = self.library[name]
        found.argtypes = arguments
        found.restype = None
        return found


class ThreadPool:
    """Threads that share the work of each call (`engine/kernels/native/thread_pool.h`). They end with this object."""

    def __init__(self, library: ctypes.CDLL, members: int, shared: SharedCores | None = None) -> None:
        """`members`: number of threads, including the caller's, besides those that may be borrowed from `shared`.
        Raises CompilerError if the system refuses more threads."""
        library.thread_pool_start.restype = ctypes.c_void_p
        library.thread_pool_start.argtypes = [ctypes.c_int32, ctypes.c_void_p]
        library.thread_pool_stop.argtypes = [ctypes.c_void_p]
        address = library.thread_pool_start(members, None if shared is None else shared.address)
        if address is None:
            raise CompilerError(f"the system refused {members - 1} more threads")
        self.address: int = address
        self._shared = shared  # whose memory the threads read
        # Not run at interpreter exit: the process can end while the threads sleep.
        weakref.finalize(self, library.thread_pool_stop, address).atexit = False
