"""Deploys, inspects, changes and removes a cluster on Ray from outside, for `moonserve deploy`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from deploy.ray.config import ClusterConfig
from deploy.ray.events import Event
from protocol.errors import ConfigError, MoonserveError

INSTALL = "pip install 'moonserve[ray]'"
NAMESPACE_PREFIX = "moonserve-"
POLL_S = 0.5
CALL_WITHIN_S = 30.0
# A failure that lasts longer has a permanent cause, such as a port in use, not a predecessor that has yet to end.
FAILS_FOR_S = 20.0

Say = Callable[[str], None]


class NotThere(MoonserveError):
    """There is no such cluster, or it does not answer."""


def connect(address: str) -> None:
    """Connects to the Ray cluster at `address`: `auto`, `host:port` or `ray://…`. Raises ConfigError if ray is not
    installed, NotThere if nothing answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {INSTALL}") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NotThere(
            f"no Ray cluster at {address}: {error}; start one with `ray start --head --disable-usage-stats`, or name "
            "its address with --address"
        ) from error


class Deployment:
    """Handle of the cluster of one namespace, through its controller. Calls block."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def status(self) -> dict[str, Any]:
        """Returns `Controller.status`. Raises NotThere."""
        found: dict[str, Any] = self._ask(self._controller.status)
        return found

    def wish(self, event: Event) -> None:
        """Sends an operator's event. Raises ConfigError if it is refused, NotThere."""
        refusal: str = self._ask(self._controller.wish, event)
        if refusal:
            raise ConfigError(refusal)

    def tail(self, name: str) -> str:
        """Returns the end of a process's log. Raises ConfigError if there is no such process, NotThere."""
        text: str = self._ask(self._controller.tail, name)
        return text

    def wait(self, until: Callable[[dict[str, Any]], bool], timeout_s: float, say: Say) -> dict[str, Any]:
        """Reports every change of a stage to `say` until `until` accepts a status, and returns it. Raises NotThere
        after `timeout_s`, ConfigError if a process cannot start for `FAILS_FOR_S`."""
        give_up_at = time.monotonic() + timeout_s
        told: dict[str, str] = {}
        failing_since: dict[str, float] = {}
        while True:
            status = self.status()
            _tell(status, told, say)
            if until(status):
                return status
            _check(status, failing_since)
            if time.monotonic() > give_up_at:
                raise NotThere(f"not within {timeout_s:.0f} s; missing: {', '.join(status['missing']) or 'nothing'}")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Ends the controller itself, after everything else has ended."""
        import ray

        ray.kill(self._controller, no_restart=True)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(method.remote(*arguments), timeout=CALL_WITHIN_S)
        except RayTaskError as error:
            if isinstance(error.cause, MoonserveError):
                raise error.cause from error
            raise
        except (GetTimeoutError, RayActorError) as error:
            raise NotThere(f"the cluster's controller does not answer: {error}") from error


def deploy(config: ClusterConfig, cluster_token: str) -> Deployment:
    """Starts a cluster; `Deployment.wait` returns once it serves. Raises ConfigError if one of that name exists."""
    import ray

    from deploy.ray import actors
    from deploy.ray.controller import Controller

    try:
        made = (
            ray.remote(Controller)
            .options(
                name=actors.CONTROLLER,
                namespace=config.namespace,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=8,
                num_cpus=0,
                # On the head, so that the controller ends only if all of Ray does. An affinity to the head's node id
                # may be spilled to another node, and has no effect after the head is restarted.
                resources={actors.HEAD: 0.001},
            )
            .remote(config, cluster_token)
        )
    except ValueError as error:
        raise ConfigError(
            f"there is a cluster {config.name!r} already: `moonserve deploy down --name {config.name}` takes it away, "
            "or give this one another name"
        ) from error
    return Deployment(made)


def find(name: str | None) -> Deployment:
    """Returns the cluster of that name, or the only one. Raises NotThere."""
    import ray
    from ray.util import list_named_actors

    from deploy.ray.actors import CONTROLLER

    names = sorted(
        each["namespace"].removeprefix(NAMESPACE_PREFIX)
        for each in list_named_actors(all_namespaces=True)
        if each["name"] == CONTROLLER and each["namespace"].startswith(NAMESPACE_PREFIX)
    )
    if name is None and len(names) > 1:
        raise NotThere(f"there are several clusters, choose one with --name: {', '.join(names)}")
    if not names or (name is not None and name not in names):
        known = f"; there is {', '.join(names)}" if names else ""
        raise NotThere(f"no cluster {name or ''} is deployed on this Ray cluster{known}")
    chosen = name or names[0]
    return Deployment(ray.get_actor(CONTROLLER, namespace=f"{NAMESPACE_PREFIX}{chosen}"))


def leftovers(name: str) -> list[str]:
    """Returns the names of actors and placement groups that remain of a cluster that was taken down."""
    from deploy.ray import actors

    return actors.leftovers(f"{NAMESPACE_PREFIX}{name}")


def _tell(status: dict[str, Any], told: dict[str, str], say: Say) -> None:
    for process in status["processes"]:
        name, stage = process["name"], process["stage"]
        if told.get(name) != stage:
            told[name] = stage
            say(f"{name:14} {stage:20} {process['host']}")


def _check(status: dict[str, Any], failing_since: dict[str, float]) -> None:
    now = time.monotonic()
    failures = {p["name"]: p["failure"] for p in status["processes"] if p["failure"]}
    for name in set(failing_since) - set(failures):
        del failing_since[name]
    for name, failure in failures.items():
        if now - failing_since.setdefault(name, now) > FAILS_FOR_S:
            raise ConfigError(f"{name} cannot start: {failure}")
