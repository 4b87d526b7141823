"""`moonserve drain INSTANCE` and `moonserve role INSTANCE prefill|decode`: change a running worker.

A drained worker keeps running and can be put back into service (`--undo`). A store node is drained as by `kvctl drain`.
Gateways and conductors drain when a signal ends them. A change of role is requested from the worker itself, and the
gateway reports when it is back.
"""

import asyncio
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from moonserve.deploy.admin.kvctl import main as kvctl
from moonserve.deploy.terminal import (
    CALL_TIMEOUT_S,
    EXIT_OK,
    KEY_ENV,
    POLL_S,
    TOKEN_ENV,
    Output,
    add_worker_options,
    cluster_view,
    credentials,
    find_instance,
    require_other_worker_of_role,
    run,
)
from moonserve.protocol.errors import InvalidRequest, MoonserveError, NoWorker, PeerLost, Unauthenticated
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import role_to_wire


def drain(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `drain`."""

    def body(arguments: Namespace) -> int:
        view = cluster_view(arguments.url, environ.get(KEY_ENV, ""))
        found = _find(view, arguments)
        if found["role"] == Role.STORE:
            return kvctl(_kvctl_arguments(view, arguments), environ)
        asyncio.run(_drain(arguments, found["rpc_address"], environ, Output("drain")))
        return EXIT_OK

    return run(_drain_parser(environ), argv, body)


def _find(view: dict[str, Any], arguments: Namespace) -> dict[str, Any]:
    """Returns the instance. Raises NoWorker if it is unknown, InvalidRequest if it cannot be drained."""
    name = arguments.instance
    if name in view["gateways"]:
        raise InvalidRequest(f"{name} is a gateway: send it SIGUSR1 to drain it; it ends after its last request")
    instances: list[dict[str, Any]] = view["instances"]
    found = find_instance(instances, name)
    if found is None:
        raise NoWorker(
            f"{arguments.url} knows no instance {name}; a conductor needs no draining: send it SIGTERM, and a standby "
            "takes over"
        )
    if found["role"] != Role.STORE and not (arguments.undo or arguments.force):
        require_other_worker_of_role(found, instances, "Start another one first")
    return found


def _kvctl_arguments(view: dict[str, Any], arguments: Namespace) -> list[str]:
    stores = (i["rpc_address"] for i in view["instances"] if i["role"] == Role.STORE)
    nodes = [part for address in stores for part in ("--node", address)]
    return ["drain", arguments.instance, *nodes, *(["--undo"] if arguments.undo else [])]


async def _drain(arguments: Namespace, address: str, environ: Mapping[str, str], output: Output) -> None:
    name = arguments.instance
    async with Channels(*credentials(environ)) as channels:
        state = await _set_draining(channels, address, not arguments.undo)
        if arguments.undo:
            output.line(f"{name} accepts new requests again")
            return
        output.note(f"{name} accepts no new requests")
        while not (state.idle or arguments.no_wait):
            await asyncio.sleep(POLL_S)
            state = await _set_draining(channels, address, None)
            if not state.draining:
                raise NoWorker(f"{name} was put back into service meanwhile")
    if state.idle:
        output.line(f"{name} has no requests in flight: it can be stopped")


async def _set_draining(channels: Channels, address: str, draining: bool | None) -> worker_pb2.DrainState:
    call = worker_pb2_grpc.DrainingStub(channels.to(address)).SetDraining
    request = worker_pb2.SetDrainingRequest(draining=draining)
    state: worker_pb2.DrainState = await channels.call(call, request, timeout_s=CALL_TIMEOUT_S)
    return state


def _drain_parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve drain",
        description="Takes a worker or a store node out of service while it runs, and waits until it can be stopped.",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, the API key from {KEY_ENV}. exit codes: 0 done; "
        "1 no such instance, or not done in full; 2 usage, wrong secret or key; 3 no answer",
    )
    parser.add_argument("instance", help="its id, as decode-0")
    parser.add_argument("--undo", action="store_true", help="put it back into service")
    add_worker_options(parser, environ)
    return parser


_UNKNOWN_CALL = grpc.StatusCode.UNIMPLEMENTED
# In addition to the drain: for the end of the turn and the gateway's next view of the cluster.
_SETTLE_S = 15.0
_PATIENCE_S = 30.0
"""Time for which the gateway may fail to report the worker's role."""


def role(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `role`."""
    return run(_role_parser(environ), argv, lambda given: asyncio.run(_switch(given, environ)))


async def _switch(arguments: Namespace, environ: Mapping[str, str]) -> int:
    role, output = Role(arguments.role), Output("role")
    key = environ.get(KEY_ENV, "")
    instances = await _instances(arguments.url, key)
    found = find_instance(instances, arguments.instance)
    if found is None:
        raise NoWorker(f"{arguments.url} knows no worker {arguments.instance}")
    if found["role"] == role:
        output.line(f"{arguments.instance} is a {role} worker")
        return EXIT_OK
    if not arguments.force:
        require_other_worker_of_role(found, instances, "Give another worker this role first")
    async with Channels(*credentials(environ)) as channels:
        await _request_role(channels, found["rpc_address"], role, arguments.drain_s)
    if arguments.no_wait:
        output.line(f"{arguments.instance} is about to become a {role} worker")
        return EXIT_OK
    await _wait_for_role(arguments, key, role)
    output.line(f"{arguments.instance} is a {role} worker now")
    return EXIT_OK


async def _request_role(channels: Channels, rpc_address: str, role: Role, drain_s: float | None) -> None:
    """Requests a change of role from a worker. Raises the worker's error, InvalidRequest if it cannot change roles."""
    request = worker_pb2.SwitchRoleRequest(role=role_to_wire(role), drain_s=drain_s)
    call = worker_pb2_grpc.RoleSwitchStub(channels.to(rpc_address)).SwitchRole
    try:
        await channels.call(call, request, timeout_s=CALL_TIMEOUT_S)
    except PeerLost as error:
        status = error.__cause__
        if isinstance(status, grpc.aio.AioRpcError) and status.code() is _UNKNOWN_CALL:
            raise InvalidRequest("this worker cannot change its role; start it with --role-switching on") from error
        raise


async def _wait_for_role(arguments: Namespace, key: str, role: Role) -> None:
    """Waits until the worker has the role. Raises NoWorker on timeout; without --drain-s, only the worker has one."""
    limit_s = None if arguments.drain_s is None else arguments.drain_s + _SETTLE_S
    try:
        async with asyncio.timeout(limit_s):
            while await _role_of(arguments, key) != role:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise NoWorker(f"{arguments.instance} has not rejoined as a {role} worker yet") from error


async def _role_of(arguments: Namespace, key: str) -> str:
    """Returns the worker's role, or "" while it is not a member. Retries if the gateway cannot answer, for example
    while a conductor starts. Raises MoonserveError after `_PATIENCE_S`."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            found = find_instance(await _instances(arguments.url, key), arguments.instance)
        except Unauthenticated:
            raise
        except MoonserveError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(POLL_S)
        else:
            return "" if found is None else str(found["role"])


async def _instances(url: str, api_key: str) -> list[dict[str, Any]]:
    """Returns the instances from the gateway's view. Raises MoonserveError if it does not answer."""
    view = await asyncio.to_thread(cluster_view, url, api_key)
    found: list[dict[str, Any]] = view["instances"]
    return found


def _role_parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve role",
        description="Changes a running worker's role; it must have been started with --role-switching on.",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, with TLS the files from "
        f"MOONSERVE_TLS_CERTIFICATE, …_KEY and …_AUTHORITY, the API key from {KEY_ENV}. exit codes: 0 it has the "
        "role; 1 no such worker, or not back yet; 2 usage, wrong secret or key; 3 no answer, or it cannot change",
    )
    parser.add_argument("instance", help="the worker's id, as worker-0")
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--drain-s", type=float, help="seconds for requests in flight to finish")
    add_worker_options(parser, environ)
    return parser
