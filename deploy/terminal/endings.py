"""How commands about a running cluster end: with which exit code, and with which last words about an error."""

from __future__ import annotations

from protocol.errors import (
    ConfigError,
    InvalidRequest,
    MoonserveError,
    NoWorker,
    PeerError,
    Unauthenticated,
)

EXIT_OK = 0
EXIT_NOT_FOUND = 1  # no such thing; also found corrupt, or could not be done in full
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3  # a process or the registry; what the others said was printed
EXIT_INTERRUPTED = 130  # as shells count SIGINT

KEY_ENV = "MOONSERVE_API_KEY"
TOKEN_ENV = "MOONSERVE_CLUSTER_TOKEN"


class NotFound(MoonserveError):
    """Who was asked does not know it."""


def explained(error: MoonserveError) -> str:
    """What went wrong, in a line, and which secret to set where one is missing."""
    if isinstance(error, Unauthenticated) and KEY_ENV not in error.message:
        return f"{error.message}; set {TOKEN_ENV} to the cluster's"
    return error.message if isinstance(error, PeerError) else str(error)


def exit_code(error: MoonserveError) -> int:
    """Of a command that ends with this error."""
    if isinstance(error, Unauthenticated | ConfigError | InvalidRequest):
        return EXIT_USAGE
    return EXIT_NOT_FOUND if isinstance(error, NoWorker | NotFound) else EXIT_UNREACHABLE
