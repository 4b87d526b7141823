"""A cluster on Ray from outside: deployed, looked at, changed and taken away. What `moonserve deploy` does."""

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
# A cause that lasts, such as a port in use, and not the moment before a predecessor has ended.
FAILS_FOR_S = 20.0

Say = Callable[[str], None]


class NotThere(MoonserveError):
    """No such cluster, or it does not answer."""


def connect(address: str) -> None:
    """To the Ray cluster at `address`: `auto`, `host:port` or `ray://…`. Raises ConfigError where ray is not installed,
    NotThere where nothing answers."""
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
    """The cluster of one namespace, by its controller. Calls block."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def status(self) -> dict[str, Any]:
        """`Controller.status`. Raises NotThere."""
        found: dict[str, Any] = self._ask(self._controller.status)
        return found

    def wish(self, event: Event) -> None:
        """Raises ConfigError for what cannot be, NotThere."""
        refusal: str = self._ask(self._controller.wish, event)
        if refusal:
            raise ConfigError(refusal)

    def tail(self, name: str) -> str:
        """Raises ConfigError where there is no such process, NotThere."""
        text: str = self._ask(self._controller.tail, name)
        return text

    def wait(self, until: Callable[[dict[str, Any]], bool], timeout_s: float, say: Say) -> dict[str, Any]:
        """Tells of every change until a status is as it should be. Raises NotThere after `timeout_s`, ConfigError for a
        process that cannot start for a reason that lasts."""
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
        """The controller itself, when everything else has ended."""
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
    """Begins; `Deployment.wait` tells when it serves. Raises ConfigError where there is one of that name."""
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
                # Ray ends with its head; so the controller never ends without it. An affinity to the head's node id may
                # be spilled to another node, and means nothing after the head has started anew.
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
    """The cluster of that name, or the only one. Raises NotThere."""
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
    """What exists still of a cluster that was taken down."""
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
