"""`moonserve role INSTANCE prefill|decode`: a running worker changes its role.

The gateway says where the worker is, the worker is told, and the gateway says when it is back in the other role. Owns
the arguments and the exit code.
"""

from __future__ import annotations

import asyncio
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from deploy.explain import DEFAULT_URL, KEY_ENV, URL_ENV
from deploy.gateway_view import cluster_view
from deploy.kvctl.main import TOKEN_ENV
from deploy.kvctl.output import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    Output,
)
from protocol.errors import InvalidRequest, MoonserveError, NoWorker, PeerLost, Unauthenticated
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels
from protocol.tls import files_in, load
from protocol.wire import role_to_wire

_TIMEOUT_S = 10.0
_POLL_S = 0.2
# Beyond the drain: its end, and the gateway's next look at the cluster.
_SETTLE_S = 15.0


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `role`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    output = Output()
    try:
        asyncio.run(_switch(arguments, environ, output))
    except MoonserveError as error:
        output.note(f"moonserve role: {_explained(error)}")
        return _exit_code(error)
    return EXIT_OK


async def _switch(arguments: Namespace, environ: Mapping[str, str], output: Output) -> None:
    role = Role(arguments.role)
    key = environ.get(KEY_ENV, "")
    instances = await _instances(arguments.url, key)
    found = next((i for i in instances if i["instance_id"] == arguments.instance), None)
    if found is None:
        raise NoWorker(f"{arguments.url} knows of no worker {arguments.instance}")
    if found["role"] == role:
        output.line(f"{arguments.instance} is a {role} worker")
        return
    if not arguments.force:
        _check_successors(found, instances)
    channels = channels_of(environ)
    await command(found["rpc_address"], role, arguments.drain_s, channels)
    if arguments.no_wait:
        output.line(f"{arguments.instance} is about to become a {role} worker")
        return
    await _until_back(arguments, key, role)
    output.line(f"{arguments.instance} is a {role} worker now")


async def command(
    rpc_address: str, role: Role, drain_s: float | None, channels: Channels
) -> worker_pb2.SwitchRoleReply:
    """Tells a worker to change, and closes the channels. Raises what it answers, InvalidRequest when it cannot."""
    request = worker_pb2.SwitchRoleRequest(role=role_to_wire(role), drain_s=drain_s)
    try:
        stub = worker_pb2_grpc.RoleSwitchStub(channels.to(rpc_address))
        reply: worker_pb2.SwitchRoleReply = await channels.call(
            stub.SwitchRole, request, timeout_s=_TIMEOUT_S
        )
        return reply
    except PeerLost as error:
        if _is_unknown_call(error):
            raise InvalidRequest(
                "this worker cannot change its role; start it with --role-switching on"
            ) from error
        raise
    finally:
        await channels.close()


def channels_of(environ: Mapping[str, str]) -> Channels:
    """With the token and the certificates of the environment. Raises ConfigError."""
    files = files_in(environ)
    return Channels(environ.get(TOKEN_ENV, ""), None if files is None else load(files))


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
            while True:
                instances = await _instances(arguments.url, key)
                roles = {each["instance_id"]: each["role"] for each in instances}
                if roles.get(arguments.instance) == role:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise NoWorker(f"{arguments.instance} has not come back as {role} worker yet") from error


def _check_successors(leaving: dict[str, Any], instances: Sequence[dict[str, Any]]) -> None:
    """Raises InvalidRequest where nobody would be left to do what the worker does now."""
    role = leaving["role"]
    if sum(each["role"] == role and not each["draining"] for each in instances) < 2:
        raise InvalidRequest(
            f"{leaving['instance_id']} is the only {role} worker; without one, requests fail. Give another worker "
            "this role first, or insist with --force"
        )


async def _instances(url: str, api_key: str) -> list[dict[str, Any]]:
    """As the gateway shows them. Raises MoonserveError when it does not answer."""
    view = await asyncio.to_thread(cluster_view, url, api_key)
    found: list[dict[str, Any]] = view["instances"]
    return found


def _explained(error: MoonserveError) -> str:
    if isinstance(error, Unauthenticated) and KEY_ENV not in error.message:
        return f"{error.message}; set {TOKEN_ENV} to the cluster's"
    return error.message


def _exit_code(error: MoonserveError) -> int:
    if isinstance(error, NoWorker):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, InvalidRequest | Unauthenticated) else EXIT_UNREACHABLE


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
    parser.add_argument("--url", default=environ.get(URL_ENV, DEFAULT_URL), help="of the gateway")
    parser.add_argument(
        "--drain-s", type=float, help="seconds that what is under way gets to finish"
    )
    parser.add_argument(
        "--force", action="store_true", help="also if it is the only worker of its role"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it has changed")
    return parser
