"""A cluster as an application of Ray Serve, for `serve deploy` and KubeRay's RayService.

Serve starts one replica, which deploys the cluster and reports if it is whole. Clients use the cluster's own gateways,
never Serve. Needs ray[serve].
"""

import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from moonserve.deploy.ray import command
from moonserve.deploy.ray.config import ClusterConfig, parse_cluster
from moonserve.protocol.errors import ConfigError, MoonserveError
from moonserve.protocol.process.config import ENV_PREFIX

# Enough to start a large model or to replace a lost machine. Serve replaces an unhealthy replica, which helps neither.
PATIENCE_S = 600.0


class Incomplete(MoonserveError):
    """A process of the cluster has been missing for `PATIENCE_S`."""


class ClusterReplica:
    """The replica of Serve. It may be restarted: the cluster consists of its own actors and is found again."""

    def __init__(self, config: ClusterConfig) -> None:
        token = os.environ.get(f"{ENV_PREFIX}CLUSTER_TOKEN") or secrets.token_hex(16)
        try:
            self._deployment = command.deploy(config, token)
        except ConfigError:  # a cluster of that name exists
            self._deployment = command.find(config.name)
        self._whole_at = time.monotonic()

    def check_health(self) -> None:
        """Called by Serve every few seconds. Raises Incomplete."""
        status = self._deployment.status()
        now = time.monotonic()
        if status["is_whole"]:
            self._whole_at = now
        elif now - self._whole_at > PATIENCE_S:
            raise Incomplete(f"missing for {PATIENCE_S:.0f} s: {', '.join(status['missing'])}")

    def __call__(self) -> dict[str, Any]:
        """Returns `Controller.status` over Serve's own HTTP."""
        return self._deployment.status()


def build(arguments: Mapping[str, Any]) -> Any:
    """Builds the application for `import_path: moonserve.deploy.ray.application:build`. `arguments`: contents of a
    cluster's YAML file. Raises ConfigError."""
    from ray import serve

    config = parse_cluster(arguments)
    # A replica that starts may have to wait for its predecessor's last answer.
    deployment = serve.deployment(
        name="moonserve",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=5,
        health_check_timeout_s=command.CALL_WITHIN_S,
    )(ClusterReplica)
    return deployment.bind(config)
