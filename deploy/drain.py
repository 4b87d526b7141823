"""`moonserve drain INSTANCE`: takes a running process out of service, and waits until nothing is under way there.

A worker goes on running and can be put back (`--undo`); a store node is emptied as by `kvctl drain`. Gateways and
conductors drain as they end, which their signals are for. Owns the arguments and the exit code.
"""

from __future__ import annotations

import asyncio
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.explain import DEFAULT_URL, KEY_ENV, URL_ENV
from deploy.gateway_view import cluster_view
from deploy.kvctl.main import TOKEN_ENV
from deploy.kvctl.main import main as kvctl
from deploy.kvctl.output import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    Output,
)
from deploy.role import channels_of
from protocol.errors import InvalidRequest, MoonserveError, NoWorker, Unauthenticated
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels

_TIMEOUT_S = 10.0
_POLL_S = 0.2


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `drain`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    output = Output()
    try:
        view = cluster_view(arguments.url, environ.get(KEY_ENV, ""))
        found = _find(view, arguments)
        if found["role"] == Role.STORE:
            return kvctl(_kvctl_arguments(view, arguments), environ)
        asyncio.run(_drain(arguments, found["rpc_address"], environ, output))
    except MoonserveError as error:
        output.note(f"moonserve drain: {_explained(error)}")
        return _exit_code(error)
    return EXIT_OK


def _find(view: dict[str, Any], arguments: Namespace) -> dict[str, Any]:
    """The instance. Raises NoWorker or InvalidRequest."""
    name = arguments.instance
    if name in view["gateways"]:
        raise InvalidRequest(
            f"{name} is a gateway: send it SIGUSR1, and it takes nothing new and ends with its last request"
        )
    instances: list[dict[str, Any]] = view["instances"]
    found = next((each for each in instances if each["instance_id"] == name), None)
    if found is None:
        raise NoWorker(
            f"{arguments.url} knows of no {name}; a conductor needs no draining: SIGTERM, and a standby leads"
        )
    role = found["role"]
    is_needed = sum(i["role"] == role and not i["draining"] for i in instances) < 2
    if role != Role.STORE and is_needed and not (arguments.undo or arguments.force):
        raise InvalidRequest(
            f"{name} is the only {role} worker; without one, requests wait and fail. Start another one first, or "
            "insist with --force"
        )
    return found


def _kvctl_arguments(view: dict[str, Any], arguments: Namespace) -> list[str]:
    stores = (i["rpc_address"] for i in view["instances"] if i["role"] == Role.STORE)
    nodes = [part for address in stores for part in ("--node", address)]
    return ["drain", arguments.instance, *nodes, *(["--undo"] if arguments.undo else [])]


async def _drain(
    arguments: Namespace, address: str, environ: Mapping[str, str], output: Output
) -> None:
    name = arguments.instance
    channels = channels_of(environ)
    try:
        state = await _set(channels, address, not arguments.undo)
        if arguments.undo:
            output.line(f"{name} takes new work again")
            return
        output.note(f"{name} takes nothing new")
        while not (state.idle or arguments.no_wait):
            await asyncio.sleep(_POLL_S)
            state = await _set(channels, address, None)
            if not state.draining:
                raise NoWorker(f"{name} was put back into service meanwhile")
        if state.idle:
            output.line(f"{name} has nothing under way: it can be stopped")
    finally:
        await channels.close()


async def _set(channels: Channels, address: str, draining: bool | None) -> worker_pb2.DrainState:
    stub = worker_pb2_grpc.DrainingStub(channels.to(address))
    request = worker_pb2.SetDrainingRequest(draining=draining)
    state: worker_pb2.DrainState = await channels.call(
        stub.SetDraining, request, timeout_s=_TIMEOUT_S
    )
    return state


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
        prog="moonserve drain",
        description="Takes a worker or a store node out of service while it runs, and waits until it can be stopped.",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, the API key from {KEY_ENV}. exit codes: 0 done; "
        "1 no such instance, or not done in full; 2 usage, wrong secret or key; 3 no answer",
    )
    parser.add_argument("instance", help="its id, as decode-0")
    parser.add_argument("--url", default=environ.get(URL_ENV, DEFAULT_URL), help="of the gateway")
    parser.add_argument("--undo", action="store_true", help="put it back into service")
    parser.add_argument(
        "--force", action="store_true", help="also if it is the only worker of its role"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="do not wait until nothing is under way"
    )
    return parser
