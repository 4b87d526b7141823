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

from deploy.kvctl.main import main as kvctl
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
from protocol.errors import InvalidRequest, MoonserveError, NoWorker
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `drain`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    output = Output("drain")
    try:
        view = cluster_view(arguments.url, environ.get(KEY_ENV, ""))
        found = _find(view, arguments)
        if found["role"] == Role.STORE:
            return kvctl(_kvctl_arguments(view, arguments), environ)
        asyncio.run(_drain(arguments, found["rpc_address"], environ, output))
    except MoonserveError as error:
        output.problem(explained(error))
        return exit_code(error)
    return EXIT_OK


def _find(view: dict[str, Any], arguments: Namespace) -> dict[str, Any]:
    """The instance. Raises NoWorker or InvalidRequest."""
    name = arguments.instance
    if name in view["gateways"]:
        raise InvalidRequest(
            f"{name} is a gateway: send it SIGUSR1, and it takes nothing new and ends with its last request"
        )
    instances: list[dict[str, Any]] = view["instances"]
    found = named(instances, name)
    if found is None:
        raise NoWorker(
            f"{arguments.url} knows of no {name}; a conductor needs no draining: SIGTERM, and a standby leads"
        )
    if found["role"] != Role.STORE and not (arguments.undo or arguments.force):
        require_successor(found, instances, "Start another one first")
    return found


def _kvctl_arguments(view: dict[str, Any], arguments: Namespace) -> list[str]:
    stores = (i["rpc_address"] for i in view["instances"] if i["role"] == Role.STORE)
    nodes = [part for address in stores for part in ("--node", address)]
    return ["drain", arguments.instance, *nodes, *(["--undo"] if arguments.undo else [])]


async def _drain(
    arguments: Namespace, address: str, environ: Mapping[str, str], output: Output
) -> None:
    name = arguments.instance
    async with calling(*credentials(environ)) as channels:
        state = await _set(channels, address, not arguments.undo)
        if arguments.undo:
            output.line(f"{name} takes new work again")
            return
        output.note(f"{name} takes nothing new")
        while not (state.idle or arguments.no_wait):
            await asyncio.sleep(POLL_S)
            state = await _set(channels, address, None)
            if not state.draining:
                raise NoWorker(f"{name} was put back into service meanwhile")
    if state.idle:
        output.line(f"{name} has nothing under way: it can be stopped")


async def _set(channels: Channels, address: str, draining: bool | None) -> worker_pb2.DrainState:
    stub = worker_pb2_grpc.DrainingStub(channels.to(address))
    request = worker_pb2.SetDrainingRequest(draining=draining)
    state: worker_pb2.DrainState = await channels.call(
        stub.SetDraining, request, timeout_s=CALL_TIMEOUT_S
    )
    return state


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve drain",
        description="Takes a worker or a store node out of service while it runs, and waits until it can be stopped.",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, the API key from {KEY_ENV}. exit codes: 0 done; "
        "1 no such instance, or not done in full; 2 usage, wrong secret or key; 3 no answer",
    )
    parser.add_argument("instance", help="its id, as decode-0")
    parser.add_argument("--undo", action="store_true", help="put it back into service")
    add_arguments(parser, environ)
    return parser
