"""`kvctl limits` and `kvctl limit TARGET [CEILING]`: show and set how much host memory the KV of workers may take.

These verbs apply to workers, not store nodes. The gateway (--url) or --node HOST:PORT gives their addresses. TARGET is
a worker's id, or the model's name for all its workers.
"""

from __future__ import annotations

import asyncio
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass
from typing import Any

from deploy.kvctl import objects
from deploy.kvctl.cluster import CALL_TIMEOUT_S, Cluster
from deploy.terminal.client import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    KEY_ENV,
    calling,
    cluster_view,
    explained,
)
from deploy.terminal.output import Output, Table, bar, size
from protocol.config import parse_bytes
from protocol.errors import ConfigError, MoonserveError, NoWorker, PeerLost
from protocol.ids import Role
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import Channels

_SIZES = {
    ">floor": "floor_bytes",
    ">ceiling": "ceiling_bytes",
    ">at most": "largest_bytes",
    ">waits for": "wanted_bytes",
}
_TOLD = ("resident_bytes", "held_bytes", *_SIZES.values())


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker and its address."""

    name: str
    role: str
    rpc_address: str


Outcome = worker_pb2.KvLimits | MoonserveError


def add_to(verbs: objects.Verbs, common: ArgumentParser) -> None:
    show = objects.add(verbs, "limits", run_limits, common, "show what workers' KV may take")
    change = objects.add(verbs, "limit", run_limit, common, "change what workers' KV may take")
    change.add_argument("target", metavar="MODEL_OR_INSTANCE", help="a worker, or all of a model")
    change.add_argument("ceiling", nargs="?", type=_bytes, help="at most so much, as 4GiB")
    change.add_argument("--floor", type=_bytes, help="of a shared budget, always so much")
    change.add_argument("--budget", type=_bytes, help="of all workers that share it")
    for parser in (show, change):
        parser.set_defaults(asks_stores=False)


async def run_limits(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    workers, _ = await _workers(arguments, cluster)
    request = worker_pb2.GetLimitsRequest()
    async with calling(cluster.token, cluster.tls) as channels:
        outcomes = await asyncio.gather(*(_call(channels, each, "GetLimits", request) for each in workers))
    return _show(workers, outcomes, output)


async def run_limit(arguments: Namespace, cluster: Cluster, output: Output) -> int:
    if arguments.ceiling is None and arguments.floor is None and arguments.budget is None:
        raise ConfigError("nothing to change: give a ceiling, --floor or --budget")
    workers, models = await _workers(arguments, cluster)
    if arguments.target not in models:
        workers = [each for each in workers if each.name == arguments.target]
    if not workers:
        raise NoWorker(f"{arguments.target} is neither a worker nor the model of any")
    request = worker_pb2.SetLimitsRequest(
        ceiling_bytes=arguments.ceiling,
        floor_bytes=arguments.floor,
        budget_bytes=arguments.budget,
    )
    async with calling(cluster.token, cluster.tls) as channels:
        # One after the other: lowered floors make room for raised ones.
        outcomes = [await _call(channels, each, "SetLimits", request) for each in workers]
    return _show(workers, outcomes, output)


async def _workers(arguments: Namespace, cluster: Cluster) -> tuple[list[Worker], list[str]]:
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
            output.problem(f"{worker.name}: {explained(outcome)}")
        else:
            told = {name: getattr(outcome, name) for name in _TOLD}
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
