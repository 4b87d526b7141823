"""Options of the gateway process."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.client_config import ClientConfig
from protocol.config import option
from protocol.errors import ConfigError
from protocol.process import ProcessConfig
from protocol.tracing import TracingConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig, ClientConfig, TracingConfig):
    """`moonserve gateway`."""

    instance_id: str = option("gateway-0", help="name of this gateway in the cluster")
    port: int = option(8000, help="port of the OpenAI-compatible server; 0 lets the system choose")
    model: str = option(
        help="folder of the model; only its tokenizer and its configuration are read"
    )
    served_model_name: tuple[str, ...] = option(
        (), help="names under which clients ask for the model; by default the folder's name"
    )
    reuse_port: bool = option(
        False,
        help="share the port with other gateways of this host and user; begin to listen when the cluster is ready",
    )
    listen_fd: int | None = option(
        None,
        help="listen on this inherited socket, bound to --host and --port, which others have, too, so that connections "
        "wait while one gateway gives way to the next; set by serve",
    )
    drain_s: float = option(3.0, help="seconds that requests under way get when the gateway stops")

    @property
    def shares_port(self) -> bool:
        """Whether connections that this gateway takes no more may find another one."""
        return self.reuse_port or self.listen_fd is not None

    def __post_init__(self) -> None:
        self.check_clients()
        if self.reuse_port and self.listen_fd is not None:
            raise ConfigError("--reuse-port and --listen-fd exclude each other")
