"""`moonserve kvctl`: selects the verb and the cluster, and returns the exit code. The verbs of stores are in `kvctl_*`.

`limits` and `limit TARGET [CEILING]` are here: they show and set how much host memory the KV of workers may take. They
apply to workers, not store nodes. The gateway (--url) or --node HOST:PORT gives their addresses. TARGET is a worker's
id, or the model's name for all its workers.
"""

import asyncio
import os
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonserve.deploy.admin import kvctl_drain, kvctl_modify, kvctl_objects, kvctl_show
from moonserve.deploy.admin.kvctl_cluster import CALL_TIMEOUT_S, StoreCluster, require_target
from moonserve.deploy.terminal import (
    DEFAULT_URL,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    KEY_ENV,
    TOKEN_ENV,
    URL_ENV,
    Output,
    Table,
    bar,
    cluster_view,
    credentials,
    error_text,
    run,
    size,
)
from moonserve.protocol.errors import ConfigError, MoonserveError, NoWorker, PeerLost
from moonserve.protocol.membership.registry.client import connect_registry
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.config import EXIT_INTERRUPTED, parse_bytes
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.grpc_transport import Channels

# -- limits

_SIZES = {
    ">floor": "floor_bytes",
    ">ceiling": "ceiling_bytes",
    ">at most": "largest_bytes",
    ">waits for": "wanted_bytes",
}
_JSON_FIELDS = ("resident_bytes", "held_bytes", *_SIZES.values())


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker and its address."""

    name: str
    role: str
    rpc_address: str


Outcome = worker_pb2.KvLimits | MoonserveError


def add_limits(verbs: kvctl_objects.Verbs, common: ArgumentParser) -> None:
    show = kvctl_objects.add(verbs, "limits", run_limits, common, "show the memory limits of workers' KV")
    change = kvctl_objects.add(verbs, "limit", run_limit, common, "set the memory limits of workers' KV")
    change.add_argument("target", metavar="MODEL_OR_INSTANCE", help="a worker, or all of a model")
    change.add_argument("ceiling", nargs="?", type=_bytes, help="upper limit, as 4GiB")
    change.add_argument("--floor", type=_bytes, help="guaranteed part of a shared budget")
    change.add_argument("--budget", type=_bytes, help="budget of all workers that share it")
    for parser in (show, change):
        parser.set_defaults(asks_stores=False)


async def run_limits(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    workers, _ = await _workers(arguments, cluster)
    request = worker_pb2.GetLimitsRequest()
    async with Channels(cluster.token, cluster.tls) as channels:
        outcomes = await asyncio.gather(*(_call(channels, each, "GetLimits", request) for each in workers))
    return _show(workers, outcomes, output)


async def run_limit(arguments: Namespace, cluster: StoreCluster, output: Output) -> int:
    if arguments.ceiling is None and arguments.floor is None and arguments.budget is None:
        raise ConfigError("nothing to change: give a ceiling, --floor or --budget")
    workers, models = await _workers(arguments, cluster)
    if arguments.target not in models:
        workers = [each for each in workers if each.name == arguments.target]
    if not workers:
        raise NoWorker(f"{arguments.target} is neither a worker nor a served model")
    request = worker_pb2.SetLimitsRequest(
        ceiling_bytes=arguments.ceiling,
        floor_bytes=arguments.floor,
        budget_bytes=arguments.budget,
    )
    async with Channels(cluster.token, cluster.tls) as channels:
        # One after the other: lowered floors make room for raised ones.
        outcomes = [await _call(channels, each, "SetLimits", request) for each in workers]
    return _show(workers, outcomes, output)


async def _workers(arguments: Namespace, cluster: StoreCluster) -> tuple[list[Worker], list[str]]:
    """Returns the workers and the names of their model. Raises MoonserveError."""
    if arguments.nodes:
        if any(":" not in node for node in arguments.nodes):
            raise ConfigError("a worker's --node is its HOST:PORT; its id goes after the verb")
        # A worker given by address is selected for any target.
        named = getattr(arguments, "target", "")
        return [Worker(named or node, "", node) for node in arguments.nodes], [named]
    view = await asyncio.to_thread(cluster_view, arguments.url, os.environ.get(KEY_ENV, ""))
    workers = [
        Worker(each["instance_id"], each["role"], each["rpc_address"])
        for each in view["instances"]
        if each["role"] in (Role.PREFILL, Role.DECODE)
    ]
    return sorted(workers, key=lambda each: each.name), list(view["models"])


async def _call(channels: Channels, worker: Worker, method: str, request: Any) -> Outcome:
    stub = worker_pb2_grpc.KvMemoryStub(channels.to(worker.rpc_address))
    try:
        limits: worker_pb2.KvLimits = await channels.call(getattr(stub, method), request, timeout_s=CALL_TIMEOUT_S)
        return limits
    except MoonserveError as error:
        return error


def _show(workers: list[Worker], outcomes: list[Outcome], output: Output) -> int:
    """Prints each worker's limits or error and returns the exit code."""
    table = Table(output, "worker", "role", "resident", *_SIZES, ">budget")
    for worker, outcome in zip(workers, outcomes, strict=True):
        if isinstance(outcome, MoonserveError):
            output.record(worker=worker.name, role=worker.role, error=outcome.message)
            output.problem(f"{worker.name}: {error_text(outcome)}")
        else:
            told = {name: getattr(outcome, name) for name in _JSON_FIELDS}
            budget = outcome.budget_bytes if outcome.HasField("budget_bytes") else None
            output.record(worker=worker.name, role=worker.role, **told, budget_bytes=budget)
            share = bar(outcome.resident_bytes / outcome.ceiling_bytes)
            table.add(
                *(worker.name, worker.role, f"{share} {size(outcome.resident_bytes)}"),
                *(size(told[name]) for name in _SIZES.values()),
                "its own" if budget is None else size(budget),
            )
    table.flush()
    failures = [each for each in outcomes if isinstance(each, MoonserveError)]
    if not failures:
        return EXIT_OK
    if any(isinstance(each, PeerLost) for each in failures):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if len(failures) == len(outcomes) else EXIT_NOT_FOUND


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


# -- the command

VERBS = (
    *(kvctl_show.add_ls, kvctl_show.add_stat, kvctl_show.add_nodes),
    *(kvctl_modify.add_replicas, kvctl_modify.add_pin, kvctl_modify.add_drop, kvctl_modify.add_verify),
    *(kvctl_drain.add_to, add_limits),
)
REGISTRY_ENV = "MOONSERVE_REGISTRY"

_EPILOG = f"""\
The cluster's registry is --registry or {REGISTRY_ENV}: redis://…, redis+sentinel://…, or host:port of a directory.
limits and limit need none: they ask the gateway, --url or {URL_ENV}.
The cluster's secret is read from {TOKEN_ENV}, with TLS the files from MOONSERVE_TLS_CERTIFICATE, …_KEY and …_AUTHORITY.
exit codes: 0 done; 1 not found, found corrupt or not done in full; 2 usage or wrong token; 3 a node or the registry
could not be reached
"""


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `kvctl`."""

    def body(arguments: Namespace) -> int:
        output = Output("kvctl", as_json=arguments.json, long=arguments.long)
        try:
            return asyncio.run(_run(arguments, output, environ))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return run(_parser(), argv, body)


async def _run(arguments: Namespace, output: Output, environ: Mapping[str, str]) -> int:
    url = arguments.registry or environ.get(REGISTRY_ENV) or None
    if arguments.asks_stores:
        if arguments.url is not None:
            raise ConfigError("--url is for limits and limit: store nodes are found by --registry or --node")
        require_target(url, arguments.nodes)
    elif arguments.url is None:
        arguments.url = environ.get(URL_ENV, DEFAULT_URL)
    token, tls = credentials(environ)
    registry = None
    if url and arguments.asks_stores:
        registry = connect_registry(url, cluster_token=token, tls=tls)
    cluster = StoreCluster(registry, arguments.nodes, token, tls)
    try:
        code: int = await arguments.run(arguments, cluster, output)
        return code
    finally:
        await cluster.close()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve kvctl",
        description="Inspects and operates a running KV store; limits the memory of workers' KV.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    _add_common(parser)
    parser.set_defaults(registry=None, nodes=[], url=None, json=False, long=False)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    # The same options are valid after the verb. If absent there, they must not reset those before the verb.
    common = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    _add_common(common)
    for add in VERBS:
        add(verbs, common)
    return parser


def _add_common(parser: ArgumentParser) -> None:
    # The options have no default of their own, so the parser's default applies.
    parser.add_argument("--registry", metavar="URL", help="registry of the cluster")
    parser.add_argument(
        "--node",
        metavar="NODE",
        dest="nodes",
        action="append",
        help="only this node, by id, or by HOST:PORT without asking a registry; may be repeated",
    )
    parser.add_argument("--url", help="address of the gateway, for limits and limit")
    parser.add_argument("--json", action="store_const", const=True, help="print JSON lines")
    parser.add_argument("--long", action="store_const", const=True, help="whole keys, all columns")
