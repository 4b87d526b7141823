"""`moonserve deploy VERB`: operates a cluster on Ray from the terminal."""

from __future__ import annotations

import json
import os
import secrets
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.plan import Kind
from deploy.ray.autoscaler import COUNTED
from deploy.ray.config import load_cluster
from deploy.ray.driver import Deployment, connect, deploy, find, leftovers
from deploy.ray.events import Event, Leave, RestartAll, Scale, TakeDown
from deploy.terminal.client import TOKEN_ENV, run
from protocol.errors import ConfigError

EXIT_NOT_DONE = 1


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `deploy`."""
    return run(_parser(environ), argv, lambda arguments: int(arguments.run(arguments)))


def _deploy(arguments: Namespace) -> int:
    config = load_cluster(arguments.cluster)  # reports errors before Ray is contacted
    if arguments.check:
        print(f"{arguments.cluster} is in order")
        return 0
    connect(arguments.address)
    deployment = deploy(config, arguments.token or secrets.token_hex(16))
    if arguments.no_wait:
        return 0
    status = deployment.wait(lambda status: bool(status["is_whole"]), arguments.timeout_s, _say)
    urls = {process["facts"].get("http") for process in status["processes"]} - {None}
    for url in sorted(urls):
        print(f"{config.name} serves on {url}")
    return 0


def _status(arguments: Namespace) -> int:
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


def _logs(arguments: Namespace) -> int:
    print(_found(arguments).tail(arguments.instance))
    return 0


def _change(arguments: Namespace) -> int:
    """Runs `scale`, `restart` or `drain`: sends the operator's wishes and waits until they are done."""
    wishes: list[Event] = arguments.wishes(arguments)
    deployment = _found(arguments)
    for wish in wishes:
        deployment.wish(wish)
    if not arguments.no_wait:
        deployment.wait(_is_settled, arguments.timeout_s, _say)
    return 0


def _down(arguments: Namespace) -> int:
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


def _is_settled(status: dict[str, Any]) -> bool:
    return bool(status["is_whole"]) and not status["is_restarting"]


def _found(arguments: Namespace) -> Deployment:
    connect(arguments.address)
    return find(arguments.name)


def _scaling(text: str) -> Scale:
    kind, equals, count = text.partition("=")
    if not equals or kind not in set(Kind) or not (count.isascii() and count.isdigit()):
        raise ConfigError(f"{text!r} is none of {', '.join(f'{kind}=N' for kind in COUNTED)}")
    return Scale(kind=Kind(kind), count=int(count))


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


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve deploy",
        description="A cluster on Ray (docs/ray.md).",
        epilog=f"The cluster's secret is read from {TOKEN_ENV}, and made when it is not set. exit codes: 0 done; 1 not "
        "whole; 2 usage, or what cannot be; 3 no answer",
    )
    parser.set_defaults(token=environ.get(TOKEN_ENV))
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
    added = verb("scale", _change, "change how many there are", waits=True)
    added.add_argument("counts", nargs="+", metavar="KIND=N", help="such as prefill=3")
    added.set_defaults(wishes=lambda given: [_scaling(text) for text in given.counts])
    added = verb("restart", _change, "restart one process after the other", waits=True)
    added.add_argument("instances", nargs="*", metavar="ID", help="these only")
    added.set_defaults(wishes=lambda given: [RestartAll(names=tuple(given.instances))])
    added = verb("drain", _change, "let one finish what it has, and leave", waits=True)
    added.add_argument("instance", metavar="ID", help="as status lists it")
    added.set_defaults(wishes=lambda given: [Leave(name=given.instance)])
    verb("down", _down, "end everything and leave nothing", waits=True)
    return parser
