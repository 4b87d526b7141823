"""The least time of a decode step: the bytes that it must read over the measured memory bandwidth of the cores."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.engine.shapes import Shape
from moonserve.engine.model.config import ModelConfig, load_model_config
from moonserve.protocol.kv_blocks import DTYPE_BYTES
from moonserve.protocol.process.native_libraries import load_library, shared_cache

_BYTES = 512 << 20  # many times the size of any cache
_LINE = 64
_ROUNDS = 9


def read_bytes_per_s(cores: Sequence[int] = ()) -> float:
    """Returns the best bandwidth of several rounds. With fewer than two `cores` it is measured in processor time on the
    current core, otherwise in wall time on all of `cores` together. Raises CompilerError if it cannot compile."""
    library = load_library(Path(__file__).with_name("read.c"), ("-O3", "-march=native"), shared_cache())
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = (ctypes.c_char * _BYTES).from_buffer(memory)
    ctypes.memset(view, 1, _BYTES)
    address = ctypes.addressof(view)
    if len(cores) < 2:
        times = [_time_one(library, address) for _ in range(_ROUNDS)]
    else:
        times = [_time_several(library, address, cores) for _ in range(_ROUNDS)]
    return _BYTES / min(times)


def _time_one(library: ctypes.CDLL, address: int) -> float:
    begin = time.process_time()
    library.read_all(address, _BYTES // _LINE)
    return time.process_time() - begin


def _time_several(library: ctypes.CDLL, address: int, cores: Sequence[int]) -> float:
    """Starts timing when all threads are on their cores, because the kernel is slow to separate two on one core."""
    part = _BYTES // len(cores)
    barrier = threading.Barrier(len(cores))
    instants: list[float] = []

    def read(number: int) -> None:
        os.sched_setaffinity(0, {cores[number]})  # of this thread only
        barrier.wait()
        instants.append(time.perf_counter())
        library.read_all(address + number * part, part // _LINE)
        instants.append(time.perf_counter())

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(instants) - min(instants)


def decode_step_bytes(folder: Path, dtype: str, shape: Shape) -> int:
    """Returns the bytes of weights and KV that a decode step reads; unused rows of the embedding do not count."""
    config = load_model_config(folder)
    return DTYPE_BYTES[dtype] * (_weights(config, shape.batch) + shape.batch * shape.context * _kv(config))


def _weights(config: ModelConfig, batch: int) -> int:
    inner: float = config.num_layers * config.intermediate_size
    if config.experts is not None:  # those that are expected to be chosen by some of the sequences
        unused = (1 - config.experts.per_token / config.experts.count) ** batch
        used = config.experts.count * (1 - unused)
        inner = config.experts.inner_size(config.num_layers, config.intermediate_size, used)
    matrices = config.num_layers * config.attention_weights + int(3 * config.hidden_size * inner)
    return matrices + config.vocab_size * config.hidden_size


def _kv(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim
