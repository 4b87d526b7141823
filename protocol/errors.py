"""The one error tree of the cluster: whose fault it is decides what happens next.

Every class has a stable `code` that crosses process borders (`protocol.rpc` carries it in gRPC metadata and in event
streams) and comes out as the same class on the other side.
"""

from __future__ import annotations

from typing import ClassVar


class MoonserveError(Exception):
    """Base of all errors that cross a boundary. `ids` names what it concerns (request, instance, lease, …)."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    """Another placement may succeed."""

    def __init__(self, message: str, **ids: str) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids
        self.retry_after_s: float | None = None

    def __str__(self) -> str:
        suffix = " ".join(f"{name}={value}" for name, value in self.ids.items())
        return f"{self.message} [{suffix}]" if suffix else self.message


class InvalidRequest(MoonserveError):
    """The caller's fault; repeating it cannot help. `param` names the offending parameter where there is one."""

    code = "invalid_request"
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, **ids: str) -> None:
        super().__init__(message, **ids)
        self.param = param


class ConfigError(MoonserveError):
    """What the operator asked for cannot be started; the message says what to do. Exit code 2."""

    code = "config"


class Overloaded(MoonserveError):
    """Nothing is broken, there is only too much to do. Carries when to come back and what was predicted."""

    code = "overloaded"
    predicted_ttft_s: float | None = None
    predicted_tbt_s: float | None = None

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        predicted_ttft_s: float | None = None,
        predicted_tbt_s: float | None = None,
        **ids: str,
    ) -> None:
        super().__init__(message, **ids)
        self.retry_after_s = retry_after_s
        self.predicted_ttft_s = predicted_ttft_s
        self.predicted_tbt_s = predicted_tbt_s


class NoWorker(MoonserveError):
    """No instance of a needed role is alive."""

    code = "no_worker"
    retryable = True


class PeerError(MoonserveError):
    """Another process of the cluster misbehaved or cannot be reached."""

    code = "peer"
    retryable = True


class PeerLost(PeerError):
    """A peer died or did not answer in time."""

    code = "peer_lost"


class NotLeader(PeerError):
    """This conductor does not lead, or has led for too short a time to know the cluster. Who asks again, here or at the
    leader, may be answered; `ids["leader"]` is the leader's address where it is known."""

    code = "not_leader"


class IntegrityError(PeerError):
    """Bytes did not match their checksum; they were dropped."""

    code = "integrity"


class StaleLease(MoonserveError):
    """A lease, window or epoch that is no longer valid; its holder must discard what it has."""

    code = "stale"
    retryable = True


class Incompatible(MoonserveError):
    """Two processes were built for different weights, layouts or protocol versions and refuse to pair."""

    code = "incompatible"


class Unauthenticated(MoonserveError):
    """The cluster token is missing or wrong."""

    code = "unauthenticated"


class DeadlineExceeded(MoonserveError):
    """The request's own time limit passed."""

    code = "deadline"


class Cancelled(MoonserveError):
    """The client went away or asked for it."""

    code = "cancelled"


def error_classes() -> dict[str, type[MoonserveError]]:
    """The class that introduces each `code`; classes without a code of their own stay within one process."""
    found: dict[str, type[MoonserveError]] = {}
    pending: list[type[MoonserveError]] = [MoonserveError]
    while pending:
        cls = pending.pop()
        if "code" in vars(cls):
            found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found
