"""A leader's followers as processes: started, joined, watched, ended.

They run on the leader's host, start while it loads its own layers, and die with it, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engine.replica import Replica
from prefill_worker.config import PrefillConfig
from prefill_worker.pipeline.config import follower_config
from prefill_worker.pipeline.follower import facts_of, make_outbox, own_memory
from prefill_worker.pipeline.group import Follower, Group
from prefill_worker.pipeline.stage import OwnStage
from prefill_worker.pipeline.wire import source_from_wire
from prefill_worker.sending import Sender
from protocol.children import ended, terminate, until_one_has_ended
from protocol.config import to_flags
from protocol.errors import ConfigError, PeerLost
from protocol.pb import pipeline_pb2
from protocol.rpc import Channels
from protocol.status import NotReady, until_ready
from transfer import Segment, TransferEngine

_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Started:
    process: asyncio.subprocess.Process
    ready: asyncio.Task[str]  # its lean address


class FollowerProcesses:
    """All followers of one leader."""

    def __init__(self, config: PrefillConfig, started: Sequence[_Started]) -> None:
        self._config = config
        self._started = started
        self._channels = Channels(config.cluster_token, config.tls())

    async def join(self, replica: Replica, transfer: TransferEngine, segment: Segment) -> Group:
        """The group, once all followers have loaded. Raises ConfigError when one cannot start or is not like the
        others."""
        addresses = await asyncio.gather(*(each.ready for each in self._started))
        followers = [Follower(self._channels, address) for address in addresses]
        outbox = make_outbox(self._config, replica, transfer)
        previous = outbox.source
        for rank, follower in enumerate(followers, start=1):
            told = await follower.join(previous)
            _require_equal(told, facts_of(replica), rank)
            previous = source_from_wire(told.hidden)
        own = OwnStage(
            replica.thread,
            own_memory(replica, segment),
            Sender(transfer, self._config.transfer_patience()).submit,
            outbox=outbox,
        )
        return Group(own, followers)

    async def watch(self, group: Group) -> None:
        """Breaks the group as soon as one has ended."""
        await until_one_has_ended(each.process for each in self._started)
        group.lost(PeerLost("its process has ended"))

    async def stop(self) -> None:
        """Ends all of them."""
        await self._channels.close()
        await asyncio.gather(*(_stop(each) for each in self._started))


@contextlib.asynccontextmanager
async def followers_of(config: PrefillConfig) -> AsyncIterator[FollowerProcesses]:
    """Starts the followers; they have ended when the block is left."""
    started: list[_Started] = []
    processes = FollowerProcesses(config, started)
    try:
        for rank in range(1, config.pipeline_parallel_size):
            started.append(await _start(config, rank))  # noqa: PERF401 - those before are ended, too
        yield processes
    finally:
        await processes.stop()


async def _start(config: PrefillConfig, rank: int) -> _Started:
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prefill_worker.pipeline",
            *to_flags(follower_config(config, rank, write_fd)),
            env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": config.cluster_token},
            pass_fds=[write_fd],
        )
    finally:
        os.close(write_fd)
    return _Started(process, asyncio.create_task(_ready(read_fd, rank)))


async def _ready(read_fd: int, rank: int) -> str:
    """A follower's lean address, once it serves. Raises ConfigError when it will not."""
    try:
        return (await until_ready(read_fd))["lean"]
    except NotReady as error:
        raise ConfigError(f"pipeline stage {rank}: {error}; see its log") from error


def _require_equal(
    told: pipeline_pb2.StageJoinReply, own: pipeline_pb2.StageJoinReply, rank: int
) -> None:
    """Raises ConfigError where a stage would compute something else than the leader thinks."""
    expected = (rank, own.size, own.fingerprint, own.kernels, own.attention, own.num_blocks)
    found = (told.rank, told.size, told.fingerprint, told.kernels, told.attention, told.num_blocks)
    if found != expected:
        raise ConfigError(f"pipeline stage {rank} is {found}, and the leader needs {expected}")


async def _stop(started: _Started) -> None:
    started.ready.cancel()
    terminate(started.process)
    await ended(started.process, _STOP_S)
