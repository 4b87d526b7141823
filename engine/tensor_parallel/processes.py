"""Manages the rank processes of a worker from rank 0: start, join, steps, supervision and end.

The processes run on rank 0's host, start while it loads its own share, and end with it for whatever reason. Rule: a
team is whole or lost. If a rank dies or does not answer, every later step fails and the worker ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.engine import Engine
from engine.parts import shards
from engine.replica_config import ReplicaConfig, cache_folder_of
from engine.step import Step
from engine.tensor_parallel import steps
from engine.tensor_parallel.rank import facts, rank_config
from engine.tensor_parallel.shared import MAX_RANKS, Ranks, RanksLibrary
from engine.tensor_parallel.team import Leading, Team
from protocol.children import ended, terminate, until_one_has_ended
from protocol.config import to_flags
from protocol.errors import ConfigError, PeerLost
from protocol.native import CompilerError
from protocol.process import Lifecycle
from protocol.status import NotReady, until_ready

log = logging.getLogger(__name__)

_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Started:
    rank: int
    process: asyncio.subprocess.Process
    ready: asyncio.Task[dict[str, str]]


class RankProcesses:
    """Rank processes of one worker, without rank 0. Implements `engine.tensor_parallel.team.Others`."""

    def __init__(self, config: ReplicaConfig, lifecycle: Lifecycle) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._loop = asyncio.get_running_loop()
        self._meeting_fd: int | None = None
        self._sockets: list[socket.socket] = []
        self._started: list[_Started] = []
        self._watching: asyncio.Task[None] | None = None
        self.lost: PeerLost | None = None

    async def start(self, model: ModelConfig, *, num_blocks: int, pool_fd: int) -> Team:
        """Starts the processes and returns the `Team` with which rank 0's engine is loaded. `pool_fd`: memory that the
        ranks can map and write. Raises ConfigError if the model cannot be divided among the ranks."""
        config, size = self._config, self._config.tensor_parallel_size
        shard = shards(model, size)[0]
        folder = cache_folder_of(config)
        self._lifecycle.progress("compiling kernels", 0.0)
        library = await asyncio.to_thread(_library, size, folder)
        self._meeting_fd = meeting_fd = library.make_memory(size)
        for rank in range(1, size):
            await self._start(rank, meeting_fd, num_blocks, pool_fd)
        shared = mmap.mmap(meeting_fd, library.memory_bytes(size))
        ranks = Ranks(library, shared, rank=0, size=size, sockets=self._sockets)
        return Team(shard=shard, ranks=ranks, vocab_size=model.vocab_size)

    async def _start(self, rank: int, meeting_fd: int, num_blocks: int, pool_fd: int) -> None:
        own, other = steps.pair()
        self._sockets.append(own)
        read_fd, write_fd = os.pipe()
        flags = to_flags(
            rank_config(
                self._config,
                rank,
                num_blocks=num_blocks,
                pool_fd=pool_fd,
                steps_fd=other.fileno(),
                meeting_fd=meeting_fd,
                status_fd=write_fd,
            )
        )
        handed = [write_fd, pool_fd, other.fileno(), meeting_fd]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "moonserve", "tensor-parallel-rank", *flags, pass_fds=handed
            )
        finally:
            other.close()  # then only the rank holds it, and it is closed when the rank ends
            os.close(write_fd)
        ready = asyncio.create_task(until_ready(read_fd))
        self._started.append(_Started(rank, process, ready))

    async def join(self, engine: Engine) -> None:
        """Waits for the ranks and makes rank 0's loaded `engine` lead them. Raises ConfigError if a rank cannot start
        or would compute something else."""
        for each in self._started:
            try:
                told = await each.ready
            except NotReady as error:
                raise ConfigError(f"rank {each.rank}: {error.message}") from error
            if told != facts(engine):
                raise ConfigError(f"rank {each.rank} is {told}, and rank 0 {facts(engine)}")
        self._watching = asyncio.create_task(self._watch())
        engine.lead(Leading(self))

    async def _watch(self) -> None:
        """Marks the team as lost as soon as a process has ended."""
        await until_one_has_ended(each.process for each in self._started)
        lost = [
            f"rank {each.rank} (exit code {each.process.returncode})"
            for each in self._started
            if each.process.returncode is not None
        ]
        self._lose(f"{', '.join(lost)} ended")

    def _lose(self, what: str) -> None:
        """Ends the worker in an orderly way: steps in flight fail, and the worker leaves the conductor."""
        if self.lost is None:
            self.lost = PeerLost(what)
            log.error("this worker ends, one of its ranks is lost: %s", what)
            self._hang_up()
            self._lifecycle.stopping.set()

    def _hang_up(self) -> None:
        """Shuts all sockets down, which ends every wait for steps or for another rank."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    # -- `Others`, in the engine's thread

    def tell(self, step: Step, dirty: torch.Tensor | None) -> None:
        if self.lost is not None:
            raise PeerLost(f"a rank is lost: {self.lost.message}")
        steps.send(self._sockets, steps.encode(step, dirty))

    def give_up(self, error: BaseException) -> None:
        self._hang_up()
        self._loop.call_soon_threadsafe(self._lose, f"{type(error).__name__} in a step: {error}")

    # -- the end

    async def stop(self) -> None:
        """Ends all processes and closes the sockets."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        self._hang_up()
        await asyncio.gather(*(_stop(each) for each in self._started))
        for each in self._sockets:
            each.close()
        if self._meeting_fd is not None:
            os.close(self._meeting_fd)


@contextlib.asynccontextmanager
async def other_ranks(config: ReplicaConfig, lifecycle: Lifecycle) -> AsyncIterator[RankProcesses]:
    """Provides the `RankProcesses` of a worker and ends them at the end of the block. Raises PeerLost then if the team
    was lost meanwhile."""
    processes = RankProcesses(config, lifecycle)
    try:
        yield processes
    finally:
        await processes.stop()
    if processes.lost is not None:
        raise processes.lost


def _library(size: int, cache_folder: Path) -> RanksLibrary:
    """Loads the ranks library. Raises ConfigError for too many ranks, or if they cannot share memory."""
    if size > MAX_RANKS:
        raise ConfigError(f"--tensor-parallel-size {size} is above {MAX_RANKS}")
    try:
        return RanksLibrary(cache_folder)
    except CompilerError as error:
        raise ConfigError(
            f"--tensor-parallel-size {size}: ranks cannot share memory: {error}; one rank with as many --num-threads "
            "can do without"
        ) from error


async def _stop(started: _Started) -> None:
    is_ready = started.ready.done() and started.ready.exception() is None
    if not is_ready:  # it does not watch its socket yet
        started.ready.cancel()
        await asyncio.wait({started.ready})
        terminate(started.process)
    await ended(started.process, _STOP_S)
