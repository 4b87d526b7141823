"""Tensor-parallel ranks that are threads of the test process, with the same engines and memory as processes."""

import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from moonserve.engine.engine import Engine
from moonserve.engine.kernels import Step
from moonserve.engine.kv_cache.tensors import allocate_memory
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.partition import split_into_shards
from moonserve.engine.tensor_parallel import RankGroup, StepLeader, step_messages
from moonserve.engine.tensor_parallel.collectives import RANK_TIMEOUT_S, Collectives, CollectivesLibrary
from tests.engine.kernels.calls import kernels_folder
from tests.engine.steps import load_engine


class Threads:
    """`FollowerRanks` that are notified over sockets, as rank processes are."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets

    def send(self, step: Step, dirty: torch.Tensor | None) -> None:
        step_messages.send(self._sockets, step_messages.encode(step, dirty))

    def abort(self, error: BaseException) -> None:
        for each in self._sockets:
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def threaded_ranks(
    path: Path,
    size: int,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    memory: memoryview | None = None,
    **chosen: str,
) -> Iterator[Engine]:
    """Yields the engine of rank 0 over `memory`. None: memory of its own. `chosen`: `kernels` and `kv_dtype`."""
    config, kernels = load_model_config(path), chosen.get("kernels", "native")
    nbytes = config.kv_layout(block_size, "float32", chosen.get("kv_dtype", "auto")).pool_bytes(num_blocks)
    pool = allocate_memory(nbytes) if memory is None else memory
    pairs = [step_messages.pair() for _ in range(1, size)]
    followers: list[threading.Thread] = []

    def load(rank: int, collectives: Collectives) -> Engine:
        shard = split_into_shards(config, size)[rank]
        group = RankGroup(shard=shard, collectives=collectives, vocab_size=config.vocab_size)
        own = {"memory": pool, "rank_group": group, "cache_folder": kernels_folder()}
        computed = {"kernels": kernels, "attention": kernels, **chosen}
        return load_engine(path, block_size, num_blocks=num_blocks, **own, **computed)

    sockets = [own for own, _ in pairs]
    every = make_collectives(size, pairs)
    for rank in range(1, size):
        arguments = (load(rank, every[rank]), pairs[rank - 1][1])
        followers.append(threading.Thread(target=_follow, args=arguments, daemon=True))
        followers[-1].start()
    engine = load(0, every[0])
    engine.set_step_leader(StepLeader(Threads(sockets)))
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
    while (message := step_messages.receive(connection)) is not None:
        engine.run(*step_messages.decode(message))


def make_collectives(
    size: int, pairs: Sequence[tuple[socket.socket, socket.socket]], timeout_s: float = RANK_TIMEOUT_S
) -> list[Collectives]:
    """Makes all ranks in this process. `pairs`: a socket pair of rank 0 and each other rank."""
    library = CollectivesLibrary(kernels_folder())
    memory = mmap.mmap(-1, library.memory_bytes(size))
    watched = [[own for own, _ in pairs], *([other] for _, other in pairs)]
    return [
        Collectives(library, memory, rank=n, size=size, sockets=watched[n], timeout_s=timeout_s) for n in range(size)
    ]
