"""Rank processes of one worker: their own part (`serve_rank`), and their management by rank 0 (`RankProcesses`).

A rank other than 0 loads its share of the weights, maps the pool and runs the steps that rank 0 sends. It ends when
rank 0 closes its end of the socket, orderly or not. Rank 0 handles signals that reach the whole process group, such as
Ctrl-C. Rule: either all ranks run or none. If one dies or does not answer, every later step fails and the worker ends.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from moonserve.engine.config import ReplicaConfig, cache_folder_of
from moonserve.engine.engine import Engine
from moonserve.engine.kernels import Step
from moonserve.engine.model.config import ModelConfig, load_model_config
from moonserve.engine.model.model_folder import resolve_model
from moonserve.engine.model.partition import split_into_shards
from moonserve.engine.tensor_parallel import RankGroup, StepLeader, step_messages
from moonserve.engine.tensor_parallel.collectives import MAX_RANKS, Collectives, CollectivesLibrary
from moonserve.protocol.errors import ConfigError, PeerLost
from moonserve.protocol.process.child_process import NotReady, WorkerPart, wait_for_first_exit
from moonserve.protocol.process.config import option, to_flags
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.native_libraries import CompilerError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankConfig(ReplicaConfig):
    """Options of `moonserve tensor-parallel-rank`, set by rank 0."""

    tensor_parallel_rank: int = option(help="number of the rank, from 1")
    num_blocks: int = option(help="number of blocks of the worker's pool")
    pool_fd: int = option(help="file descriptor of the pool's memory")
    steps_fd: int = option(help="file descriptor of the socket that receives steps")
    meeting_fd: int = option(help="file descriptor of the memory that ranks share")


def rank_config(
    worker: ReplicaConfig, rank: int, *, num_blocks: int, pool_fd: int, steps_fd: int, meeting_fd: int
) -> RankConfig:
    """Returns the options of a rank of `worker`. A rank is not a member of the cluster and has no metrics port."""
    values = {each.name: getattr(worker, each.name) for each in fields(ReplicaConfig)}
    values |= {
        "instance_id": f"{worker.instance_id}-rank-{rank}",
        "port": 0,
        "conductor": None,
        "cluster_token": "",
        "metrics_port": 0,
        "status_fd": None,
        "parent_pid": None,
    }
    return RankConfig(
        **values,
        tensor_parallel_rank=rank,
        num_blocks=num_blocks,
        pool_fd=pool_fd,
        steps_fd=steps_fd,
        meeting_fd=meeting_fd,
    )


async def serve_rank(config: RankConfig, lifecycle: Lifecycle) -> None:
    """Loads the engine and runs rank 0's steps until rank 0 ends. Raises ConfigError if it cannot start."""
    with socket.socket(fileno=config.steps_fd) as connection:
        lifecycle.progress("reading configuration")
        path = await asyncio.to_thread(resolve_model, config.model)
        engine = await asyncio.to_thread(_load, config, path, connection, lifecycle)
        lifecycle.ready(**compatibility(engine))
        await asyncio.to_thread(_follow, engine, connection)


def compatibility(engine: Engine) -> dict[str, str]:
    """Returns the properties in which all ranks must agree."""
    return {
        "fingerprint": engine.fingerprint,
        "kernels": engine.kernels_name,
        "attention": engine.attention_name,
    }


def _load(config: RankConfig, path: Path, connection: socket.socket, lifecycle: Lifecycle) -> Engine:
    model = load_model_config(path)
    rank, size = config.tensor_parallel_rank, config.tensor_parallel_size
    folder = cache_folder_of(config)
    layout = model.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    library = CollectivesLibrary(folder)
    shared = mmap.mmap(config.meeting_fd, library.memory_bytes(size))
    collectives = Collectives(library, shared, rank=rank, size=size, sockets=[connection])
    shard = split_into_shards(model, size)[rank]
    pool = mmap.mmap(config.pool_fd, layout.pool_bytes(config.num_blocks))
    return Engine.load(
        path,
        config=model,
        layout=layout,
        num_blocks=config.num_blocks,
        memory=memoryview(pool),
        rank_group=RankGroup(shard=shard, collectives=collectives, vocab_size=model.vocab_size),
        dtype=model.resolve_dtype(config.dtype),
        num_threads=config.threads_per_rank,
        kernels=config.kernels,
        attention=config.kernels,
        load_format=config.load_format,
        quantise=config.quantize,
        cache_folder=folder,
        progress=lifecycle.progress,
    )


def _follow(engine: Engine, connection: socket.socket) -> None:
    try:
        while (message := step_messages.receive(connection)) is not None:
            engine.run(*step_messages.decode(message))
    except PeerLost as error:
        log.warning("this rank ends: %s", error)


# -- rank 0

_STOP_S = 5.0


class RankProcesses:
    """Rank processes of one worker, without rank 0. Implements `engine.tensor_parallel.FollowerRanks`. They run on rank
    0's host, start while it loads its own share, and end with it for whatever reason."""

    def __init__(self, config: ReplicaConfig, lifecycle: Lifecycle) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._loop = asyncio.get_running_loop()
        self._meeting_fd: int | None = None
        self._sockets: list[socket.socket] = []
        self._started: list[WorkerPart] = []
        self._watching: asyncio.Task[None] | None = None
        self.failure: PeerLost | None = None

    async def start(self, model: ModelConfig, *, num_blocks: int, pool_fd: int) -> RankGroup:
        """Starts the processes and returns the `RankGroup` with which rank 0's engine is loaded. `pool_fd`: memory that
        the ranks can map and write. Raises ConfigError if the model cannot be divided among the ranks."""
        config, size = self._config, self._config.tensor_parallel_size
        shard = split_into_shards(model, size)[0]
        folder = cache_folder_of(config)
        self._lifecycle.progress("compiling kernels", 0.0)
        library = await asyncio.to_thread(_library, size, folder)
        self._meeting_fd = meeting_fd = library.make_memory(size)
        for rank in range(1, size):
            await self._start(rank, meeting_fd, num_blocks, pool_fd)
        shared = mmap.mmap(meeting_fd, library.memory_bytes(size))
        collectives = Collectives(library, shared, rank=0, size=size, sockets=self._sockets)
        return RankGroup(shard=shard, collectives=collectives, vocab_size=model.vocab_size)

    async def _start(self, rank: int, meeting_fd: int, num_blocks: int, pool_fd: int) -> None:
        own, other = step_messages.pair()
        self._sockets.append(own)
        config = rank_config(
            self._config,
            rank,
            num_blocks=num_blocks,
            pool_fd=pool_fd,
            steps_fd=other.fileno(),
            meeting_fd=meeting_fd,
        )
        with other:  # then only the rank holds it, and it is closed when the rank ends
            fds = (pool_fd, other.fileno(), meeting_fd)
            part = await WorkerPart.start("tensor-parallel-rank", to_flags(config), os.environ, fds)
        self._started.append(part)

    async def join(self, engine: Engine) -> None:
        """Waits for the ranks and makes rank 0's loaded `engine` lead them. Raises ConfigError if a rank cannot start
        or would compute something else."""
        for rank, each in enumerate(self._started, start=1):
            try:
                found = await each.ready
            except NotReady as error:
                raise ConfigError(f"rank {rank}: {error.message}") from error
            if found != compatibility(engine):
                raise ConfigError(f"rank {rank} is {found}, and rank 0 is {compatibility(engine)}")
        self._watching = asyncio.create_task(self._watch())
        engine.set_step_leader(StepLeader(self))

    async def _watch(self) -> None:
        """Ends the worker as soon as a process has ended."""
        await wait_for_first_exit(each.process for each in self._started)
        lost = [
            f"rank {rank} (exit code {each.process.returncode})"
            for rank, each in enumerate(self._started, start=1)
            if each.process.returncode is not None
        ]
        self._lose(f"{', '.join(lost)} ended")

    def _lose(self, what: str) -> None:
        """Ends the worker in an orderly way: steps in flight fail, and the worker leaves the conductor."""
        if self.failure is None:
            self.failure = PeerLost(what)
            log.error("a rank is lost, so this worker ends: %s", what)
            self._shut_sockets()
            self._lifecycle.stopping.set()

    def _shut_sockets(self) -> None:
        """Shuts all sockets down, which ends every wait for steps or for another rank."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    # -- `FollowerRanks`, in the engine's thread

    def send(self, step: Step, dirty: torch.Tensor | None) -> None:
        if self.failure is not None:
            raise PeerLost(f"a rank is lost: {self.failure.message}")
        step_messages.send(self._sockets, step_messages.encode(step, dirty))

    def abort(self, error: BaseException) -> None:
        self._shut_sockets()
        self._loop.call_soon_threadsafe(self._lose, f"{type(error).__name__} in a step: {error}")

    # -- the end

    async def stop(self) -> None:
        """Ends all processes and closes the sockets."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        self._shut_sockets()
        await asyncio.gather(*(each.stop(_STOP_S) for each in self._started))
        for each in self._sockets:
            each.close()
        if self._meeting_fd is not None:
            os.close(self._meeting_fd)


@contextlib.asynccontextmanager
async def other_ranks(config: ReplicaConfig, lifecycle: Lifecycle) -> AsyncIterator[RankProcesses]:
    """Provides the `RankProcesses` of a worker and ends them at the end of the block. Raises PeerLost then if a rank
    was lost meanwhile."""
    processes = RankProcesses(config, lifecycle)
    try:
        yield processes
    finally:
        await processes.stop()
    if processes.failure is not None:
        raise processes.failure


def _library(size: int, cache_folder: Path) -> CollectivesLibrary:
    """Loads the ranks library. Raises ConfigError for too many ranks, or if they cannot share memory."""
    if size > MAX_RANKS:
        raise ConfigError(f"--tensor-parallel-size {size} is above {MAX_RANKS}")
    try:
        return CollectivesLibrary(cache_folder)
    except CompilerError as error:
        raise ConfigError(
            f"--tensor-parallel-size {size}: ranks cannot share memory: {error}; start one rank with as many "
            "--num-threads instead"
        ) from error
