"""What goes wrong with a Redis, as errors of the one tree; for everybody who calls one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from protocol.errors import PeerError, PeerLost, Unauthenticated


@contextlib.contextmanager
def cancellable() -> Iterator[None]:
    """Raises the cancellation that redis-py lost.

    It sends within `asyncio.wait_for`, which before Python 3.12 drops a cancellation that comes in the moment in which
    the sending is done; a seat would then renew for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of redis-py and of sockets as errors of the one tree. redis-py quotes addresses, never passwords."""
    try:
        yield
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise Unauthenticated(f"redis refuses the registry's credentials: {error}") from error
    except ResponseError as error:  # out of memory, a replica, a failing disk
        raise PeerError(f"redis refuses: {error}") from error
    except TimeoutError as error:
        raise PeerLost("redis did not answer in time") from error
    except MasterNotFoundError as error:  # its text lists every sentinel with all of its options
        raise PeerLost(f"redis: {str(error).partition(' : ')[0]} by any sentinel") from error
    except (RedisError, OSError) as error:
        raise PeerLost(f"redis cannot be reached: {error}") from error
