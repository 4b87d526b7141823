"""The ranks behind rank 0 as processes: started, joined, told, watched, ended.

They run on rank 0's host, start while it loads its own share, and die with it, whatever ends it. The rule: a team is
whole or lost. When a rank has died, or does not come, every step fails from then on, and the worker ends.
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
    """All ranks but the first of one worker; `engine.tensor_parallel.team.Others`, too."""

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
        """Starts them; what rank 0's engine is loaded with. `pool_fd`: memory that they can map and write. Raises
        ConfigError for a model that cannot be shared so."""
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
                sys.executable, "-m", "engine.tensor_parallel", *flags, pass_fds=handed
            )
        finally:
            other.close()  # so that it is closed when that process ends
            os.close(write_fd)
        ready = asyncio.create_task(until_ready(read_fd))
        self._started.append(_Started(rank, process, ready))

    async def join(self, engine: Engine) -> None:
        """Once rank 0's `engine` is loaded: from now on it leads. Raises ConfigError when a rank cannot start or would
        compute something else."""
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
        """The team is lost as soon as one has ended."""
        await until_one_has_ended(each.process for each in self._started)
        lost = [
            f"rank {each.rank} (exit code {each.process.returncode})"
            for each in self._started
            if each.process.returncode is not None
        ]
        self._lose(f"{', '.join(lost)} ended")

    def _lose(self, what: str) -> None:
        """Ends the worker, in order: what is under way fails, and the conductor hears that it leaves."""
        if self.lost is None:
            self.lost = PeerLost(what)
            log.error("this worker ends, one of its ranks is lost: %s", what)
            self._hang_up()
            self._lifecycle.stopping.set()

    def _hang_up(self) -> None:
        """Whoever waits for steps, or for another rank, ends."""
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
        """Ends all of them."""
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
    """Of a worker that has several. They have ended when the block is left. Raises PeerLost then, if the team was lost
    meanwhile."""
    processes = RankProcesses(config, lifecycle)
    try:
        yield processes
    finally:
        await processes.stop()
    if processes.lost is not None:
        raise processes.lost


def _library(size: int, cache_folder: Path) -> RanksLibrary:
    """Raises ConfigError for too many ranks, and where they cannot share memory."""
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
    if not is_ready:  # it does not listen yet
        started.ready.cancel()
        await asyncio.wait({started.ready})
        terminate(started.process)
    await ended(started.process, _STOP_S)
