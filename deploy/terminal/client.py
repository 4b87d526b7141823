"""Client side of commands about a running cluster: HTTP to its gateway, gRPC to its workers, and exit codes."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any

from protocol.errors import (
    ConfigError,
    InvalidRequest,
    MoonserveError,
    NoWorker,
    PeerError,
    Unauthenticated,
)
from protocol.rpc import Channels
from protocol.tls import Certificates, files_in, load

EXIT_OK = 0
EXIT_NOT_FOUND = 1  # not found; also found corrupt, or not done in full
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3  # a process or the registry was not reached; the answers of the others were printed
EXIT_INTERRUPTED = 130  # a shell's exit code for SIGINT

KEY_ENV = "MOONSERVE_API_KEY"
TOKEN_ENV = "MOONSERVE_CLUSTER_TOKEN"


class NotFound(MoonserveError):
    """The gateway answered 404."""


def explained(error: MoonserveError) -> str:
    """Describes an error in one line and names the secret to set if authentication failed."""
    if isinstance(error, Unauthenticated) and KEY_ENV not in error.message:
        return f"{error.message}; set {TOKEN_ENV} to the cluster's"
    return error.message if isinstance(error, PeerError) else str(error)


def run(parser: ArgumentParser, argv: Sequence[str], body: Callable[[Namespace], int]) -> int:
    """Parses the arguments, runs `body` with them, prints a MoonserveError to stderr, and returns the exit code."""
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit:  # argparse has printed the error or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    try:
        return body(arguments)
    except MoonserveError as error:
        print(f"{parser.prog}: {explained(error)}", file=sys.stderr)
        return exit_code(error)


def exit_code(error: MoonserveError) -> int:
    """Returns the exit code of a command that ends with this error."""
    if isinstance(error, Unauthenticated | ConfigError | InvalidRequest):
        return EXIT_USAGE
    return EXIT_NOT_FOUND if isinstance(error, NoWorker | NotFound) else EXIT_UNREACHABLE


DEFAULT_URL = "http://127.0.0.1:8000"
URL_ENV = "MOONSERVE_URL"
_TIMEOUT_S = 10.0
# HTTPException: another protocol, or an incomplete answer; ValueError: invalid URL or invalid JSON.
_NO_ANSWER = (OSError, HTTPException, ValueError)


def add_url(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Adds the `--url` option, the address of the gateway."""
    parser.add_argument("--url", default=environ.get(URL_ENV, DEFAULT_URL), help="of the gateway")


def cluster_view(url: str, api_key: str) -> dict[str, Any]:
    """Returns the answer to `GET /v1/cluster`. Raises the errors of `fetch`."""
    return fetch(url, "/v1/cluster", api_key)


def fetch(url: str, path: str, api_key: str, *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Returns a JSON object from the gateway. Blocks. Raises Unauthenticated for a wrong key, NotFound for a 404,
    MoonserveError if there is no answer or another error status."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            view: dict[str, Any] = json.load(response)
            return view
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error) from error
    except _NO_ANSWER as error:
        raise _no_answer(url, error) from error


def _refused(url: str, error: urllib.error.HTTPError) -> MoonserveError:
    """Converts an error reply, with the gateway's own message if there is one. Reads the reply's body."""
    if error.code == 401:
        return Unauthenticated(f"wrong API key; set {KEY_ENV}")
    try:
        message = str(json.load(error)["error"]["message"])
    except (*_NO_ANSWER, KeyError, TypeError):
        return _no_answer(url, error)
    return NotFound(message) if error.code == 404 else MoonserveError(message)


def _no_answer(url: str, error: Exception) -> MoonserveError:
    # repr: a reply in another protocol is part of the text, and its control characters would move the cursor.
    why = repr(error) if isinstance(error, HTTPException) else error
    return MoonserveError(f"no answer from {url}: {why}; give the gateway's address with --url")


CALL_TIMEOUT_S = 10.0
POLL_S = 0.2


def credentials(environ: Mapping[str, str]) -> tuple[str, Certificates | None]:
    """Returns the cluster's token and the certificates that the environment names. Raises ConfigError."""
    files = files_in(environ)
    return environ.get(TOKEN_ENV, ""), None if files is None else load(files)


@contextlib.asynccontextmanager
async def calling(token: str, tls: Certificates | None) -> AsyncIterator[Channels]:
    """Yields channels that are closed at the end of the block."""
    channels = Channels(token, tls)
    try:
        yield channels
    finally:
        await channels.close()


def named(instances: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Returns the instance with this id from a gateway's list, or None."""
    return next((each for each in instances if each["instance_id"] == name), None)


def require_successor(leaving: Mapping[str, Any], instances: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Raises InvalidRequest if no other worker has the role of the leaving one. `remedy`: what to do first."""
    role = leaving["role"]
    if sum(each["role"] == role and not each["draining"] for each in instances) < 2:
        raise InvalidRequest(
            f"{leaving['instance_id']} is the only {role} worker; without one, requests wait and fail. {remedy}, "
            "or insist with --force"
        )


def add_arguments(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Adds the options `--url`, `--force` and `--no-wait`."""
    add_url(parser, environ)
    parser.add_argument("--force", action="store_true", help="also if it is the only worker of its role")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
