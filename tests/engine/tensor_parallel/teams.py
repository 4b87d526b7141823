"""Tensor-parallel team whose ranks are threads of the test process, with the same engines and memory as processes."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.config import load_model_config
from engine.engine import Engine
from engine.kv_pool import allocate
from engine.parts import shards
from engine.step import Step
from engine.tensor_parallel import steps
from engine.tensor_parallel.shared import PATIENCE_S, Ranks, RanksLibrary
from engine.tensor_parallel.team import Leading, Team
from tests.engine.kernels.calls import kernels_folder


class Threads:
    """`Others` that are notified over sockets, as rank processes are."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets

    def tell(self, step: Step, dirty: torch.Tensor | None) -> None:
        steps.send(self._sockets, steps.encode(step, dirty))

    def give_up(self, error: BaseException) -> None:
        for each in self._sockets:
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def team(
    path: Path,
    size: int,
    *,
    kernels: str = "native",
    kv_dtype: str = "auto",
    block_size: int = 16,
    num_blocks: int = 64,
    memory: memoryview | None = None,
) -> Iterator[Engine]:
    """Yields the engine of rank 0 over `memory`. None: memory of its own."""
    config = load_model_config(path)
    layout = config.kv_layout(block_size, "float32", kv_dtype)
    pool = allocate(layout.pool_bytes(num_blocks)) if memory is None else memory
    pairs = [steps.pair() for _ in range(1, size)]
    followers: list[threading.Thread] = []

    def load(rank: int, ranks: Ranks) -> Engine:
        shard = shards(config, size)[rank]
        return Engine.load(
            path,
            config=config,
            layout=layout,
            num_blocks=num_blocks,
            memory=pool,
            team=Team(shard=shard, ranks=ranks, vocab_size=config.vocab_size),
            dtype="float32",
            kernels=kernels,
            attention=kernels,
            cache_folder=kernels_folder(),
        )

    sockets = [own for own, _ in pairs]
    every = sharing(size, pairs)
    for rank in range(1, size):
        arguments = (load(rank, every[rank]), pairs[rank - 1][1])
        followers.append(threading.Thread(target=_follow, args=arguments, daemon=True))
        followers[-1].start()
    engine = load(0, every[0])
    engine.lead(Leading(Threads(sockets)))
    try:
        yield engine
    finally:
        for own in sockets:
            own.close()
        for follower in followers:
            follower.join()
        for _, other in pairs:
            other.close()


def _follow(engine: Engine, connection: socket.socket) -> None:
    while (message := steps.receive(connection)) is not None:
        engine.run(*steps.decode(message))


def sharing(
    size: int, pairs: Sequence[tuple[socket.socket, socket.socket]], patience_s: float = PATIENCE_S
) -> list[Ranks]:
    """Makes all ranks of a team in this process. `pairs`: a socket pair of rank 0 and each other rank."""
    library = RanksLibrary(kernels_folder())
    memory = mmap.mmap(-1, library.memory_bytes(size))
    watched = [[own for own, _ in pairs], *([other] for _, other in pairs)]
    return [Ranks(library, memory, rank=n, size=size, sockets=watched[n], patience_s=patience_s) for n in range(size)]
