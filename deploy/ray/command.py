"""`moonserve deploy VERB`: deploys, inspects, changes and removes a cluster on Ray, from outside of it."""

import json
import os
import secrets
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.ray.autoscaler import COUNTED
from moonserve.deploy.ray.config import ClusterConfig, load_cluster
from moonserve.deploy.ray.events import Event, RemoveCluster, RemoveProcess, RestartProcesses, Scale
from moonserve.deploy.terminal import TOKEN_ENV, run
from moonserve.protocol.errors import ConfigError, MoonserveError

INSTALL = "pip install 'moonserve[ray]'"
NAMESPACE_PREFIX = "moonserve-"
POLL_S = 0.5
CALL_WITHIN_S = 30.0
# A failure that lasts longer has a permanent cause, such as a port in use, not a predecessor that has yet to end.
FAILS_FOR_S = 20.0

Say = Callable[[str], None]


class NotDeployed(MoonserveError):
    """There is no such cluster, or it does not answer."""


def connect(address: str) -> None:
    """Connects to the Ray cluster at `address`: `auto`, `host:port` or `ray://…`. Raises ConfigError if ray is not
    installed, NotDeployed if nothing answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {INSTALL}") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NotDeployed(
            f"no Ray cluster at {address}: {error}; start one with `ray start --head --disable-usage-stats`, or name "
            "its address with --address"
        ) from error


class Deployment:
    """Handle of the cluster of one namespace, through its controller. Calls block."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def status(self) -> dict[str, Any]:
        """Returns `Controller.status`. Raises NotDeployed."""
        found: dict[str, Any] = self._call(self._controller.status)
        return found

    def send(self, event: Event) -> None:
        """Sends an operator's event. Raises ConfigError if it is refused, NotDeployed."""
        refusal: str = self._call(self._controller.apply, event)
        if refusal:
            raise ConfigError(refusal)

    def tail(self, name: str) -> str:
        """Returns the end of a process's log. Raises ConfigError if there is no such process, NotDeployed."""
        text: str = self._call(self._controller.tail, name)
        return text

    def wait(self, until: Callable[[dict[str, Any]], bool], timeout_s: float, say: Say) -> dict[str, Any]:
        """Reports every change of a stage to `say` until `until` accepts a status, and returns it. Raises NotDeployed
        after `timeout_s`, ConfigError if a process cannot start for `FAILS_FOR_S`."""
        give_up_at = time.monotonic() + timeout_s
        told: dict[str, str] = {}
        failing_since: dict[str, float] = {}
        while True:
            status = self.status()
            _report_changes(status, told, say)
            if until(status):
                return status
            _raise_if_failing(status, failing_since)
            if time.monotonic() > give_up_at:
                raise NotDeployed(
                    f"not done within {timeout_s:.0f} s; missing: {', '.join(status['missing']) or 'nothing'}"
                )
            time.sleep(POLL_S)

    def end(self) -> None:
        """Ends the controller itself, after everything else has ended."""
        import ray

        ray.kill(self._controller, no_restart=True)

    def _call(self, method: Any, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(method.remote(*arguments), timeout=CALL_WITHIN_S)
        except RayTaskError as error:
            if isinstance(error.cause, MoonserveError):
                raise error.cause from error
            raise
        except (GetTimeoutError, RayActorError) as error:
            raise NotDeployed(f"the cluster's controller does not answer: {error}") from error


def deploy(config: ClusterConfig, cluster_token: str) -> Deployment:
    """Starts a cluster; `Deployment.wait` returns once it serves. Raises ConfigError if one of that name exists."""
    import ray

    from moonserve.deploy.ray import ray_calls
    from moonserve.deploy.ray.controller import Controller

    try:
        made = (
            ray.remote(Controller)
            .options(
                name=ray_calls.CONTROLLER,
                namespace=config.namespace,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=8,
                num_cpus=0,
                # On the head, so that the controller ends only if all of Ray does. An affinity to the head's node id
                # may be spilled to another node, and has no effect after the head is restarted.
                resources={ray_calls.HEAD: 0.001},
            )
            .remote(config, cluster_token)
        )
    except ValueError as error:
        raise ConfigError(
            f"cluster {config.name!r} exists already: remove it with `moonserve deploy down --name {config.name}`, "
            "or choose another name"
        ) from error
    return Deployment(made)


def find(name: str | None) -> Deployment:
    """Returns the cluster of that name, or the only one. Raises NotDeployed."""
    import ray
    from ray.util import list_named_actors

    from moonserve.deploy.ray.ray_calls import CONTROLLER

    names = sorted(
        each["namespace"].removeprefix(NAMESPACE_PREFIX)
        for each in list_named_actors(all_namespaces=True)
        if each["name"] == CONTROLLER and each["namespace"].startswith(NAMESPACE_PREFIX)
    )
    if name is None and len(names) > 1:
        raise NotDeployed(f"there are several clusters, choose one with --name: {', '.join(names)}")
    if not names or (name is not None and name not in names):
        known = f"; there is {', '.join(names)}" if names else ""
        raise NotDeployed(f"no cluster {name or ''} is deployed on this Ray cluster{known}")
    return Deployment(ray.get_actor(CONTROLLER, namespace=f"{NAMESPACE_PREFIX}{name or names[0]}"))


def _report_changes(status: dict[str, Any], told: dict[str, str], say: Say) -> None:
    for process in status["processes"]:
        name, stage = process["name"], process["stage"]
        if told.get(name) != stage:
            told[name] = stage
            say(f"{name:14} {stage:20} {process['host']}")


def _raise_if_failing(status: dict[str, Any], failing_since: dict[str, float]) -> None:
    now = time.monotonic()
    failures = {p["name"]: p["failure"] for p in status["processes"] if p["failure"]}
    for name in set(failing_since) - set(failures):
        del failing_since[name]
    for name, failure in failures.items():
        if now - failing_since.setdefault(name, now) > FAILS_FOR_S:
            raise ConfigError(f"{name} cannot start: {failure}")


EXIT_NOT_DONE = 1


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `deploy`."""
    return run(_parser(environ), argv, lambda arguments: int(arguments.run(arguments)))


def _deploy(arguments: Namespace) -> int:
    config = load_cluster(arguments.cluster)  # reports errors before Ray is contacted
    if arguments.check:
        print(f"{arguments.cluster} is valid")
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
        print(f"{name:14} has no host")
    print(f"{status['name']}: {_summary(status)}")
    return 0 if status["is_whole"] else EXIT_NOT_DONE


def _logs(arguments: Namespace) -> int:
    print(_found(arguments).tail(arguments.instance))
    return 0


def _change(arguments: Namespace) -> int:
    """Runs `scale`, `restart` or `drain`: sends the events and waits until the cluster has settled."""
    events: list[Event] = arguments.events(arguments)
    deployment = _found(arguments)
    for event in events:
        deployment.send(event)
    if not arguments.no_wait:
        deployment.wait(_is_settled, arguments.timeout_s, _say)
    return 0


def _down(arguments: Namespace) -> int:
    from moonserve.deploy.ray.ray_calls import leftovers  # imports ray

    deployment = _found(arguments)
    deployment.send(RemoveCluster())
    status = deployment.wait(lambda status: bool(status["has_ended"]), arguments.timeout_s, _say)
    left = leftovers(f"{NAMESPACE_PREFIX}{status['name']}")
    deployment.end()
    if left:
        print(f"moonserve deploy: not removed: {', '.join(left)}", file=sys.stderr)
        return EXIT_NOT_DONE
    print(f"{status['name']} is removed")
    return 0


def _is_settled(status: dict[str, Any]) -> bool:
    return bool(status["is_whole"]) and not status["is_restarting"]


def _found(arguments: Namespace) -> Deployment:
    connect(arguments.address)
    return find(arguments.name)


def _scaling(text: str) -> Scale:
    kind, equals, count = text.partition("=")
    if not equals or kind not in set(ProcessKind) or not (count.isascii() and count.isdigit()):
        raise ConfigError(f"{text!r} is not one of {', '.join(f'{kind}=N' for kind in COUNTED)}")
    return Scale(kind=ProcessKind(kind), count=int(count))


def _line(process: dict[str, Any]) -> str:
    stage = "leaving" if process["is_leaving"] else process["stage"]
    restarts = f"{process['restarts']} restarts" if process["restarts"] else ""
    facts = " ".join(f"{key}={value}" for key, value in process["facts"].items())
    columns = f"{process['name']:14} {stage:12} {process['host']:15} {process['pid'] or '':>8}"
    return f"{columns} {restarts} {facts} {process['failure'] or ''}".rstrip()


def _summary(status: dict[str, Any]) -> str:
    if status["is_ending"]:
        return "is being removed"
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
        added.add_argument("--address", default="auto", help="address of the Ray cluster")
        if waits:
            added.add_argument("--no-wait", action="store_true", help="return at once")
            added.add_argument("--timeout-s", type=float, default=600.0, help="seconds to wait")
        if name != "ray":
            added.add_argument("--name", help="name of the cluster, if there are several")
        return added

    added = verb("ray", _deploy, "deploy the cluster that a YAML file describes", waits=True)
    added.add_argument("cluster", type=Path, help="the YAML file")
    added.add_argument("--check", action="store_true", help="only read the file")
    added = verb("status", _status, "list processes and hosts; exit code 1 while one is missing")
    added.add_argument("--json", action="store_true", help="everything, as JSON")
    added = verb("logs", _logs, "the last lines of a process's log")
    added.add_argument("instance", help="as status lists it")
    added = verb("scale", _change, "change the number of processes of a kind", waits=True)
    added.add_argument("counts", nargs="+", metavar="KIND=N", help="such as prefill=3")
    added.set_defaults(events=lambda given: [_scaling(text) for text in given.counts])
    added = verb("restart", _change, "restart one process after the other", waits=True)
    added.add_argument("instances", nargs="*", metavar="ID", help="only these processes")
    added.set_defaults(events=lambda given: [RestartProcesses(names=tuple(given.instances))])
    added = verb("drain", _change, "remove a process after it has finished its requests", waits=True)
    added.add_argument("instance", metavar="ID", help="as status lists it")
    added.set_defaults(events=lambda given: [RemoveProcess(name=given.instance)])
    verb("down", _down, "remove the whole cluster", waits=True)
    return parser
