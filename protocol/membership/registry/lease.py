"""Keeps a process's lease in the registry: joins, renews, joins again if it was forgotten; with an identity that lasts
over restarts.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moonserve.protocol.errors import (
    ConfigError,
    Incompatible,
    InvalidRequest,
    MoonserveError,
    StaleLease,
    Unauthenticated,
)
from moonserve.protocol.membership.registry import RENEW_EVERY_S, TTL_S, Member, Registry, Superseded
from moonserve.protocol.process.event_loop import background_task

log = logging.getLogger(__name__)

T = TypeVar("T")

MARGIN_S = 0.05
"""Wait after the end of another owner's lease, since both sides round to milliseconds and timers may fire early."""

INCARNATION_FACT = "life"
"""Name of the fact that differs between `RegistryLease`s, while the owner token stays the same over restarts."""

IDENTITY_FILE = "identity.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a process. `owner` and `last_epoch` become part of the member that joins.

    A restarted process takes its id over at once with the owner token. Both are kept in one file in the process's
    folder, which is never partly written."""

    instance_id: str
    owner: str = field(default_factory=lambda: secrets.token_hex(16))
    last_epoch: int = 0
    """Highest epoch that this process has had, so that the next is above it even if the registry lost its memory."""
    folder: Path | None = None

    def with_epoch(self, epoch: int) -> "Identity":
        """Returns the identity with this epoch and saves it in the folder, if there is one.

        Blocks until it is on disk. Raises OSError if that fails."""
        later = dataclasses.replace(self, last_epoch=max(epoch, self.last_epoch))
        if self.folder is not None:
            with _written(later) as fresh:
                os.replace(fresh, self.folder / IDENTITY_FILE)
            _sync_folder(self.folder)
        return later


def load_or_create_identity(folder: Path | None, wanted_id: str) -> Identity:
    """Returns the identity in `folder` and creates it on first use. Without a folder it lasts as long as the process.

    Two processes that create it at the same time get the same one. Raises ConfigError if the folder cannot be used, if
    its file is damaged, or if it belongs to another id, because the other data in it belongs to that id too.
    """
    if folder is None:
        return Identity(instance_id=wanted_id)
    try:
        identity = _load(folder) if (folder / IDENTITY_FILE).exists() else _create(folder, wanted_id)
    except OSError as error:
        raise ConfigError(f"cannot keep this process's identity in {folder}: {error}") from error
    if identity.instance_id != wanted_id:
        raise ConfigError(
            f"{folder} belongs to {identity.instance_id}, not to {wanted_id}: start with that id, or give "
            f"{wanted_id} another folder (or delete {folder / IDENTITY_FILE} to let it use this one)"
        )
    return identity


def _create(folder: Path, wanted_id: str) -> Identity:
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(instance_id=wanted_id, folder=folder)
    # Unlike a rename, a link fails if another process was first. Then that process's file is used.
    with _written(identity) as fresh, contextlib.suppress(FileExistsError):
        os.link(fresh, folder / IDENTITY_FILE)
    _sync_folder(folder)
    return _load(folder)


def _load(folder: Path) -> Identity:
    path = folder / IDENTITY_FILE
    try:
        entry: dict[str, Any] = json.loads(path.read_text())
        instance_id, owner, last_epoch = (
            entry["instance_id"],
            entry["owner"],
            entry.get("last_epoch", 0),
        )
        if not (isinstance(instance_id, str) and isinstance(owner, str) and owner):
            raise ValueError("the owner or the id is missing")
        return Identity(instance_id=instance_id, owner=owner, last_epoch=int(last_epoch), folder=folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged; delete it to give this process a new identity "
            "(it may then have to wait for its old lease to end)"
        ) from error


@contextlib.contextmanager
def _written(identity: Identity) -> Iterator[Path]:
    """Writes the identity to a temporary file on disk, readable by its owner only, and removes it after the block."""
    assert identity.folder is not None
    path = identity.folder / f".{IDENTITY_FILE}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            entry = {"instance_id": identity.instance_id, "owner": identity.owner}
            json.dump({**entry, "last_epoch": identity.last_epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flushes the folder, so that the name of the file is on disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RegistryLease:
    """Membership of one process in the registry: joins, renews the lease, joins again if the registry forgot it.

    An unreachable registry ends nothing; it is only logged, once. A later epoch of another process under the same id
    ends the membership, because two processes must not take the id from each other forever. A join whose answer was
    lost may still be performed, so each object marks its joins and adopts a later epoch that is its own.

    `on_epoch` is called after each join, in the loop's thread, with the member as the registry has it. `before_rejoin`
    is awaited before the join of a forgotten member, with the seconds since the registry last confirmed it. Other
    processes do not see the member again before it returns.
    """

    def __init__(
        self,
        registry: Registry,
        member: Member,
        *,
        ttl_s: float = TTL_S,
        renew_every_s: float = RENEW_EVERY_S,
        on_epoch: Callable[[Member], None] | None = None,
        before_rejoin: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self._incarnation = secrets.token_hex(8)
        self.member = dataclasses.replace(member, facts={**member.facts, INCARNATION_FACT: self._incarnation})
        """The member, with the epoch of the last join."""
        self.joined = asyncio.Event()
        """Set by the first join, and never cleared."""
        self._registry = registry
        self._ttl_s = ttl_s
        self._renew_every_s = renew_every_s
        self._retry_s = renew_every_s / 3
        self._on_epoch = on_epoch
        self._before_rejoin = before_rejoin
        self._confirmed_at = asyncio.get_running_loop().time()
        self._is_registry_lost = False
        self._forgotten = False  # the registry has no lease of this member; it must join again

    async def run(self) -> None:
        """Joins and renews until cancelled. Raises StaleLease if the id belongs to another process for good, and other
        errors that a retry cannot fix, such as Unauthenticated at the first join."""
        await self._first_join()
        while True:
            await asyncio.sleep(self._renew_every_s)
            await self._retry(self._renew)

    @property
    def silence_s(self) -> float:
        """Seconds since the registry last confirmed the membership, or since the start."""
        return asyncio.get_running_loop().time() - self._confirmed_at

    async def leave(self) -> None:
        """Leaves the registry, best effort: otherwise the lease ends the membership. Must not overlap with `run`."""
        if not self.joined.is_set():
            return
        try:
            await self._registry.leave(self.member)
        except MoonserveError as error:
            log.info("cannot deregister, the lease will end by itself: %s", error)

    async def _first_join(self) -> None:
        """Joins, and waits once for another owner's lease, which may be that of this process before its restart."""
        try:
            await self._retry(self._join)
            return
        except StaleLease as error:
            log.warning("waiting until the id is free: %s", error)
            await asyncio.sleep((error.retry_after_s or 0.0) + MARGIN_S)
        try:
            await self._retry(self._join)
        except StaleLease as error:
            raise StaleLease(
                f"{self.member.instance_id} belongs to another process, which keeps renewing it; "
                f"stop that process or give this one another id ({error.message})",
                **error.ids,
            ) from error

    async def _renew(self) -> None:
        if self._forgotten:
            await self._rejoin()
            return
        sent_at = asyncio.get_running_loop().time()
        try:
            await self._registry.renew(self.member, ttl_s=self._ttl_s)
            self._confirmed_at = sent_at
        except Superseded as error:
            await self._adopt_own_join(error)
        except StaleLease:
            log.warning("the registry has no lease of %s, joining again", self.member.instance_id)
            self._forgotten = True
            await self._rejoin()

    async def _rejoin(self) -> None:
        if self._before_rejoin is not None:
            await self._before_rejoin(self.silence_s)
        try:
            await self._join()
        except StaleLease as error:
            raise self._taken_error(error) from error

    async def _join(self) -> None:
        sent_at = asyncio.get_running_loop().time()
        self._on_joined(await self._registry.join(self.member, ttl_s=self._ttl_s))
        self._confirmed_at = sent_at

    async def _adopt_own_join(self, error: Superseded) -> None:
        """Adopts the later epoch if it is from a join of this object whose answer was lost; else raises StaleLease."""
        for member in await self._registry.members():
            ours = member.instance_id == self.member.instance_id
            if ours and member.facts.get(INCARNATION_FACT) == self._incarnation:
                self._on_joined(member)
                return
        raise self._taken_error(error) from error

    def _on_joined(self, member: Member) -> None:
        self.member = member
        self._forgotten = False
        log.info("joined as %s, epoch %d", member.instance_id, member.endpoint.epoch)
        self.joined.set()
        if self._on_epoch is not None:
            self._on_epoch(member)

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats `call` until it succeeds or raises an error that a retry cannot fix."""
        while True:
            try:
                result = await call()
            except MoonserveError as error:
                if self._is_final(error):
                    raise
                if not self._is_registry_lost:
                    log.warning("the registry cannot be used, continuing without it: %s", error)
                self._is_registry_lost = True
                await asyncio.sleep(self._retry_s)
                continue
            if self._is_registry_lost:
                log.info("the registry can be used again")
            self._is_registry_lost = False
            return result

    def _is_final(self, error: MoonserveError) -> bool:
        """Returns true if a retry cannot help. A process that has joined keeps trying after a change of password."""
        if isinstance(error, Unauthenticated):
            return not self.joined.is_set()
        return isinstance(error, StaleLease | InvalidRequest | Incompatible | ConfigError)

    def _taken_error(self, error: StaleLease) -> StaleLease:
        return StaleLease(
            f"{self.member.instance_id} was taken by another process, so this process ends: {error.message}",
            **error.ids,
        )


@contextlib.asynccontextmanager
async def registry_lease(lease: RegistryLease) -> AsyncIterator[asyncio.Task[None]]:
    """Keeps the lease within the block and leaves after it. The yielded task ends with an error if the id is lost."""
    try:
        async with background_task(lease.run()) as task:
            yield task
    finally:
        # Leave only after the task has ended: a later join of the task would take the id again.
        await lease.leave()
