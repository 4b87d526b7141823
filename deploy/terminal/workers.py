"""A worker of the running cluster, for commands that tell one something: which it is, may it go, how to call it.

Owns the arguments that these commands share. Knows nothing of what is told.
"""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from deploy.terminal.endings import TOKEN_ENV
from deploy.terminal.gateway_view import add_url
from protocol.errors import InvalidRequest
from protocol.rpc import Channels
from protocol.tls import Certificates, files_in, load

CALL_TIMEOUT_S = 10.0
POLL_S = 0.2


def credentials(environ: Mapping[str, str]) -> tuple[str, Certificates | None]:
    """The cluster's token and the certificates that the environment names. Raises ConfigError."""
    files = files_in(environ)
    return environ.get(TOKEN_ENV, ""), None if files is None else load(files)


@contextlib.asynccontextmanager
async def calling(token: str, tls: Certificates | None) -> AsyncIterator[Channels]:
    """Channels that are closed at the block's end."""
    channels = Channels(token, tls)
    try:
        yield channels
    finally:
        await channels.close()


def named(instances: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Of the instances that a gateway shows."""
    return next((each for each in instances if each["instance_id"] == name), None)


def require_successor(
    leaving: Mapping[str, Any], instances: Sequence[Mapping[str, Any]], remedy: str
) -> None:
    """Raises InvalidRequest where nobody would be left to do what a worker does now; `remedy`: what to do first."""
    role = leaving["role"]
    if sum(each["role"] == role and not each["draining"] for each in instances) < 2:
        raise InvalidRequest(
            f"{leaving['instance_id']} is the only {role} worker; without one, requests wait and fail. {remedy}, "
            "or insist with --force"
        )


def add_arguments(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Where the cluster is, and how careful to be."""
    add_url(parser, environ)
    parser.add_argument(
        "--force", action="store_true", help="also if it is the only worker of its role"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
