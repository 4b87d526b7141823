"""`moonserve role INSTANCE prefill|decode`: a running worker changes its role.

The gateway says where the worker is, the worker is told, and the gateway says when it is back in the other role. Owns
the arguments and the exit code.
"""

from __future__ import annotations

import asyncio
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from deploy.terminal.endings import EXIT_OK, EXIT_USAGE, KEY_ENV, TOKEN_ENV, exit_code, explained
from deploy.terminal.gateway_view import cluster_view
from deploy.terminal.output import Output
from deploy.terminal.workers import (
    CALL_TIMEOUT_S,
    POLL_S,
    add_arguments,
    calling,
    credentials,
    named,
    require_successor,
)
from protocol.errors import InvalidRequest, MoonserveError, NoWorker, PeerLost, Unauthenticated
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels
from protocol.wire import role_to_wire

# Beyond the drain: its end, and the gateway's next look at the cluster.
_SETTLE_S = 15.0
_PATIENCE_S = 30.0
"""How long the gateway may be unable to say how far the change is."""


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `role`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    output = Output("role")
    try:
        asyncio.run(_switch(arguments, environ, output))
    except MoonserveError as error:
        output.problem(explained(error))
        return exit_code(error)
    return EXIT_OK


async def _switch(arguments: Namespace, environ: Mapping[str, str], output: Output) -> None:
    role = Role(arguments.role)
    key = environ.get(KEY_ENV, "")
    instances = await _instances(arguments.url, key)
    found = named(instances, arguments.instance)
    if found is None:
        raise NoWorker(f"{arguments.url} knows of no worker {arguments.instance}")
    if found["role"] == role:
        output.line(f"{arguments.instance} is a {role} worker")
        return
    if not arguments.force:
        require_successor(found, instances, "Give another worker this role first")
    async with calling(*credentials(environ)) as channels:
        await _command(channels, found["rpc_address"], role, arguments.drain_s)
    if arguments.no_wait:
        output.line(f"{arguments.instance} is about to become a {role} worker")
        return
    await _until_back(arguments, key, role)
    output.line(f"{arguments.instance} is a {role} worker now")


async def _command(channels: Channels, rpc_address: str, role: Role, drain_s: float | None) -> None:
    """Tells a worker to change. Raises what it answers, InvalidRequest when it cannot."""
    request = worker_pb2.SwitchRoleRequest(role=role_to_wire(role), drain_s=drain_s)
    try:
        stub = worker_pb2_grpc.RoleSwitchStub(channels.to(rpc_address))
        await channels.call(stub.SwitchRole, request, timeout_s=CALL_TIMEOUT_S)
    except PeerLost as error:
        if _is_unknown_call(error):
            raise InvalidRequest(
                "this worker cannot change its role; start it with --role-switching on"
            ) from error
        raise


def _is_unknown_call(error: PeerLost) -> bool:
    match error.__cause__:
        case grpc.aio.AioRpcError() as status:
            return status.code() is grpc.StatusCode.UNIMPLEMENTED
    return False


async def _until_back(arguments: Namespace, key: str, role: Role) -> None:
    """Raises NoWorker when it does not come back in time; without --drain-s only the worker knows how long that is."""
    limit_s = None if arguments.drain_s is None else arguments.drain_s + _SETTLE_S
    try:
        async with asyncio.timeout(limit_s):
            while await _role_of(arguments, key) != role:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise NoWorker(f"{arguments.instance} has not come back as {role} worker yet") from error


async def _role_of(arguments: Namespace, key: str) -> str:
    """The worker's, empty while it is no member; asked for again where nobody can say, as while a conductor starts.
    Raises MoonserveError."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            found = named(await _instances(arguments.url, key), arguments.instance)
        except Unauthenticated:
            raise
        except MoonserveError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(POLL_S)
        else:
            return "" if found is None else str(found["role"])


async def _instances(url: str, api_key: str) -> list[dict[str, Any]]:
    """As the gateway shows them. Raises MoonserveError when it does not answer."""
    view = await asyncio.to_thread(cluster_view, url, api_key)
    found: list[dict[str, Any]] = view["instances"]
    return found


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve role",
        description="Changes a running worker's role; it must have been started with --role-switching on.",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, with TLS the files from "
        f"MOONSERVE_TLS_CERTIFICATE, …_KEY and …_AUTHORITY, the API key from {KEY_ENV}. exit codes: 0 it has the "
        "role; 1 no such worker, or not back yet; 2 usage, wrong secret or key; 3 no answer, or it cannot change",
    )
    parser.add_argument("instance", help="the worker's id, as worker-0")
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument(
        "--drain-s", type=float, help="seconds that what is under way gets to finish"
    )
    add_arguments(parser, environ)
    return parser
