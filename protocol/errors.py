"""Error classes of the cluster, in one tree, divided by who caused the error.

Every class has a stable `code`. It crosses process boundaries in replies of both RPC transports and event streams, and
becomes the same class on the other side (`protocol.rpc.wire`).
"""

from typing import ClassVar


class MoonserveError(Exception):
    """Base of all errors that cross a process boundary. `ids` names the request, instance or lease that it concerns."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    """True if another placement of the request may succeed."""

    def __init__(self, message: str, **ids: str) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids
        self.retry_after_s: float | None = None

    def __str__(self) -> str:
        suffix = " ".join(f"{name}={value}" for name, value in self.ids.items())
        return f"{self.message} [{suffix}]" if suffix else self.message


class InvalidRequest(MoonserveError):
    """The request itself is wrong, so a retry cannot help. `param` names the offending parameter, if there is one."""

    code = "invalid_request"
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, **ids: str) -> None:
        super().__init__(message, **ids)
        self.param = param


class ConfigError(MoonserveError):
    """The operator's configuration cannot be used. The message says what to do; the exit code is 2."""

    code = "config"


class Overloaded(MoonserveError):
    """The cluster has too much load for a request. Carries when to retry and the latencies that were predicted."""

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
    """This conductor does not lead, or has led for too short a time to know the cluster.

    A retry, here or at the leader, may succeed. `ids["leader"]` is the leader's address, if it is known."""

    code = "not_leader"


class IntegrityError(PeerError):
    """Data did not match its checksum and was dropped."""

    code = "integrity"


class StaleLease(MoonserveError):
    """A lease, window or epoch is no longer valid. Its holder must discard what it has."""

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
    """The client disconnected or cancelled the request."""

    code = "cancelled"


def error_classes() -> dict[str, type[MoonserveError]]:
    """Maps each `code` to the class that introduces it. Classes without their own code stay within one process."""
    found: dict[str, type[MoonserveError]] = {}
    pending: list[type[MoonserveError]] = [MoonserveError]
    while pending:
        cls = pending.pop()
        if "code" in vars(cls):
            found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found
