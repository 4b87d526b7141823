"""Executes a controller's actions in Ray: creates, finds and ends placement groups and actors. Makes no decisions.

All functions block and are called from threads. Every process has its own placement group (STRICT_PACK) on the host
chosen for it, which its ranks and stages share. The choice of hosts (`deploy.ray.placement`) spreads processes.
"""

import contextlib
import json
import time
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.experimental import internal_kv
from ray.util import get_placement_group, list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moonserve.deploy.ray.config import ClusterConfig
from moonserve.deploy.ray.events import Host
from moonserve.deploy.ray.process_actor import Assignment, ProcessActor
from moonserve.deploy.ray.processes import resources_of
from moonserve.protocol.errors import MoonserveError

CONTROLLER = "controller"
NODE_LABEL = "ray.io/node-id"
HEAD = "node:__internal_head__"  # a resource that only Ray's head has
_PLACE_WITHIN_S = 15.0
_NAME_FREE_WITHIN_S = 10.0
_KV = b"moonserve"


class CannotPlace(MoonserveError):
    """Ray has no room for a process on its chosen host, or its name is still in use."""


def nodes() -> list[tuple[Host, int]]:
    """Returns the nodes that Ray considers alive, each with its raylet's port."""
    return [
        (
            Host(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                resources=node["Resources"],
                is_head=HEAD in node["Resources"],
            ),
            node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def create_actor(assignment: Assignment, host: Host, generation: int) -> Any:
    """Creates the actor of a process, which starts the process by itself. Raises CannotPlace."""
    config = assignment.config
    bundle = resources_of(config, assignment.unit.kind).bundle()
    group = placement_group(
        [bundle],
        strategy="STRICT_PACK",
        name=_group_name(config, assignment.name, generation),
        lifetime="detached",
        bundle_label_selector=[{NODE_LABEL: host.node_id}],
    )
    if not group.wait(_PLACE_WITHIN_S):
        remove_placement_group(group)
        raise CannotPlace(f"{host.address} has no room for {assignment.name} ({bundle})")
    amounts = dict(bundle)
    options = {
        "num_cpus": amounts.pop("CPU", 0),
        "num_gpus": amounts.pop("GPU", 0),
        "memory": amounts.pop("memory", None),
        "resources": amounts,
        "name": assignment.name,
        "namespace": config.namespace,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": 8,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }
    return _named(lambda: ray.remote(ProcessActor).options(**options).remote(assignment))


def _named(make_actor: Any) -> Any:
    """Creates a named actor. Retries, because the name of a killed actor stays in use for a moment."""
    give_up_at = time.monotonic() + _NAME_FREE_WITHIN_S
    while True:
        try:
            return make_actor()
        except ValueError as error:
            if time.monotonic() > give_up_at:
                raise CannotPlace(f"the name is still in use: {error}") from error
        time.sleep(0.2)


def find_actor(config: ClusterConfig, name: str) -> Any | None:
    """Returns the actor of this name, or None."""
    try:
        return ray.get_actor(name, namespace=config.namespace)
    except ValueError:
        return None


def end_actor(config: ClusterConfig, name: str, generation: int, actor: Any | None) -> None:
    """Kills an actor, even if it does not answer, and removes its placement group."""
    if actor is not None:
        with contextlib.suppress(RayActorError, ValueError):
            ray.kill(actor, no_restart=True)
    with contextlib.suppress(ValueError):  # there is no such group
        group: PlacementGroup = get_placement_group(_group_name(config, name, generation))
        remove_placement_group(group)


def leftovers(namespace: str) -> list[str]:
    """Returns the names of a cluster's remaining actors and placement groups, except the controller."""
    named = list_named_actors(all_namespaces=True)
    actors = [each["name"] for each in named if each["namespace"] == namespace and each["name"] != CONTROLLER]
    groups = ray.util.placement_group_table().values()
    prefix = f"{namespace}/"
    return actors + [
        group["name"] for group in groups if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    ]


def write_record(config: ClusterConfig, record: dict[str, Any]) -> None:
    """Stores the record from which a restarted controller continues. It is in Ray's head, like the actors' names."""
    internal_kv._internal_kv_put(_key(config), json.dumps(record), True, namespace=_KV)


def read_record(config: ClusterConfig) -> dict[str, Any] | None:
    text = internal_kv._internal_kv_get(_key(config), namespace=_KV)
    return json.loads(text) if text else None


def drop_record(config: ClusterConfig) -> None:
    internal_kv._internal_kv_del(_key(config), namespace=_KV)


def _key(config: ClusterConfig) -> bytes:
    return config.namespace.encode()


def _group_name(config: ClusterConfig, name: str, generation: int) -> str:
    return f"{config.namespace}/{name}#{generation}"
