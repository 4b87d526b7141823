"""`moonserve deploy VERB`: a cluster on Ray from the terminal. Owns the arguments and the exit code."""

from __future__ import annotations

import json
import os
import secrets
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.ray.config import load_cluster
from deploy.ray.driver import Deployment, NotThere, connect, deploy, find, leftovers
from deploy.ray.events import Leave, RestartAll, Scale, TakeDown
from deploy.ray.units import Kind
from protocol.config import ENV_PREFIX
from protocol.errors import ConfigError, MoonserveError

EXIT_NOT_DONE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
TOKEN_ENV = f"{ENV_PREFIX}CLUSTER_TOKEN"


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `deploy`."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    try:
        code: int = arguments.run(arguments, environ)
        return code
    except NotThere as error:
        print(f"moonserve deploy: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except ConfigError as error:
        print(f"moonserve deploy: {error}", file=sys.stderr)
        return EXIT_USAGE
    except MoonserveError as error:
        print(f"moonserve deploy: {error}", file=sys.stderr)
        return EXIT_NOT_DONE


def _deploy(arguments: Namespace, environ: Mapping[str, str]) -> int:
    config = load_cluster(arguments.cluster)  # says what is wrong before Ray is asked
    if arguments.check:
        print(f"{arguments.cluster} is in order")
        return 0
    connect(arguments.address)
    deployment = deploy(config, environ.get(TOKEN_ENV) or secrets.token_hex(16))
    if arguments.no_wait:
        return 0
    status = deployment.wait(lambda status: bool(status["is_whole"]), arguments.timeout_s, _say)
    for url in _endpoints(status):
        print(f"{config.name} serves on {url}")
    return 0


def _status(arguments: Namespace, _: Mapping[str, str]) -> int:
    status = _found(arguments).status()
    if arguments.json:
        print(json.dumps(status))
        return 0
    for process in status["processes"]:
        print(_line(process))
    missing = [n for n in status["missing"] if n not in {p["name"] for p in status["processes"]}]
    for name in missing:
        print(f"{name:14} has no place")
    print(f"{status['name']}: {_summary(status)}")
    return 0 if status["is_whole"] else EXIT_NOT_DONE


def _logs(arguments: Namespace, _: Mapping[str, str]) -> int:
    print(_found(arguments).tail(arguments.instance))
    return 0


def _scale(arguments: Namespace, _: Mapping[str, str]) -> int:
    deployment = _found(arguments)
    for wish in map(_scaling, arguments.counts):
        deployment.wish(wish)
    return _settled(deployment, arguments)


def _restart(arguments: Namespace, _: Mapping[str, str]) -> int:
    deployment = _found(arguments)
    deployment.wish(RestartAll(names=tuple(arguments.instances)))
    return _settled(deployment, arguments)


def _drain(arguments: Namespace, _: Mapping[str, str]) -> int:
    deployment = _found(arguments)
    deployment.wish(Leave(name=arguments.instance))
    return _settled(deployment, arguments)


def _down(arguments: Namespace, _: Mapping[str, str]) -> int:
    deployment = _found(arguments)
    deployment.wish(TakeDown())
    status = deployment.wait(lambda status: bool(status["has_ended"]), arguments.timeout_s, _say)
    left = leftovers(status["name"])
    deployment.end()
    if left:
        print(f"moonserve deploy: left over: {', '.join(left)}", file=sys.stderr)
        return EXIT_NOT_DONE
    print(f"{status['name']} is gone")
    return 0


def _settled(deployment: Deployment, arguments: Namespace) -> int:
    if not arguments.no_wait:
        deployment.wait(_is_settled, arguments.timeout_s, _say)
    return 0


def _is_settled(status: dict[str, Any]) -> bool:
    return bool(status["is_whole"]) and not status["is_restarting"]


def _found(arguments: Namespace) -> Deployment:
    connect(arguments.address)
    return find(arguments.name)


def _scaling(text: str) -> Scale:
    kind, equals, count = text.partition("=")
    if not equals or kind not in set(Kind) or not (count.isascii() and count.isdigit()):
        kinds = ", ".join(f"{kind}=N" for kind in ("prefill", "decode", "gateway", "conductor"))
        raise ConfigError(f"{text!r} is none of {kinds}")
    return Scale(kind=Kind(kind), count=int(count))


def _endpoints(status: dict[str, Any]) -> list[str]:
    found = (process["facts"].get("http") for process in status["processes"])
    return sorted({url for url in found if url})


def _line(process: dict[str, Any]) -> str:
    stage = "leaving" if process["is_leaving"] else process["stage"]
    restarts = f"{process['restarts']} restarts" if process["restarts"] else ""
    facts = " ".join(f"{key}={value}" for key, value in process["facts"].items())
    columns = f"{process['name']:14} {stage:12} {process['host']:15} {process['pid'] or '':>8}"
    return f"{columns} {restarts} {facts} {process['failure'] or ''}".rstrip()


def _summary(status: dict[str, Any]) -> str:
    if status["is_ending"]:
        return "is being taken down"
    if status["is_restarting"]:
        return "restarts, one process after the other"
    return "serves" if status["is_whole"] else f"lacks {', '.join(status['missing'])}"


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve deploy",
        description="A cluster on Ray (docs/ray.md).",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, and made when it is not set. exit codes: 0 done; 1 not "
        "whole; 2 usage, or what cannot be; 3 no answer",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Any, text: str, *, waits: bool = False) -> ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--address", default="auto", help="of the Ray cluster")
        if waits:
            added.add_argument("--no-wait", action="store_true", help="return at once")
            added.add_argument("--timeout-s", type=float, default=600.0, help="seconds to wait")
        if name != "ray":
            added.add_argument("--name", help="of the cluster, where there are several")
        return added

    added = verb("ray", _deploy, "deploy the cluster that a YAML file describes", waits=True)
    added.add_argument("cluster", type=Path, help="the YAML file")
    added.add_argument("--check", action="store_true", help="only read the file")
    added = verb("status", _status, "what runs where; exit code 1 while something is missing")
    added.add_argument("--json", action="store_true", help="everything, as JSON")
    added = verb("logs", _logs, "the last lines of a process's log")
    added.add_argument("instance", help="as status lists it")
    added = verb("scale", _scale, "change how many there are", waits=True)
    added.add_argument("counts", nargs="+", metavar="KIND=N", help="such as prefill=3")
    added = verb("restart", _restart, "restart one process after the other", waits=True)
    added.add_argument("instances", nargs="*", metavar="ID", help="these only")
    added = verb("drain", _drain, "let one finish what it has, and leave", waits=True)
    added.add_argument("instance", metavar="ID", help="as status lists it")
    verb("down", _down, "end everything and leave nothing", waits=True)
    return parser
