"""Options of the directory."""

from dataclasses import dataclass

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option
from moonserve.protocol.process.lifecycle import ProcessConfig


@dataclass(frozen=True, kw_only=True)
class DirectoryConfig(ProcessConfig):
    """All options of the directory."""

    registry: str | None = option(
        None,
        help="registry of the cluster: redis://… or redis+sentinel://…; by default, this process is the registry",
    )
    # Mooncake's defaults for hot blocks (`kvstore.directory.replica_planner.ReplicaPlanner`).
    hot_hits: int = option(8, help="reads within the window that make a block hot")
    hot_window_s: float = option(10.0, help="seconds over which reads are counted")
    hot_extra_replicas: int = option(2, help="maximum of additional replicas of a hot block; 0 = none")
    hot_cool_s: float = option(
        60.0,
        help="seconds between two new replicas of a block, and seconds without a read before it loses one",
    )
    copies_at_once: int = option(4, help="copies between nodes that may run at once")
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def __post_init__(self) -> None:
        if self.hot_hits < 1 or self.hot_window_s <= 0 or self.hot_cool_s <= 0:
            raise ConfigError("--hot-hits, --hot-window-s and --hot-cool-s must be above 0")
        if self.hot_extra_replicas < 0 or self.copies_at_once < 1:
            raise ConfigError("--hot-extra-replicas must not be negative, --copies-at-once above 0")
        if self.registry is not None and self._is_own(self.registry):
            raise ConfigError(
                f"--registry {self.registry} is this directory itself: leave it out, "
                "and unset MOONSERVE_REGISTRY here if that is where it comes from"
            )

    def _is_own(self, registry: str) -> bool:
        """Returns True if the address is this directory's own: it would wait for itself forever."""
        host, _, port = registry.removeprefix("moonserve://").rpartition(":")
        named = "127.0.0.1" if host == "localhost" else host
        return bool(self.port) and port == str(self.port) and named in (self.host, "localhost")
