"""Configuration of the gateway. `moonserve serve` shares the options that concern clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.access.key_record import ApiKey, KeyLimits, digest_of
from gateway.generation.state import PATIENCE_S
from gateway.openai.tools.formats import FORMATS
from protocol.config import option
from protocol.errors import ConfigError
from protocol.process import ProcessConfig
from protocol.registry.redis_address import SCHEMES
from protocol.tracing import TracingConfig


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Options for clients: access, limits and timeouts."""

    api_key: tuple[str, ...] = option(
        (),
        help="keys that clients may present; without any keys the gateway is open to all",
        masked=True,
    )
    tenant_keys: tuple[str, ...] = option(
        (),
        help="keys of tenants, as alice=KEY,bob=KEY, beside --api-key; without them a tenant is who `user` names",
        masked=True,
    )
    api_key_file: str | None = option(
        None, help="file of keys that `moonserve keys` writes; changes count within a second"
    )
    api_keys_in_registry: bool = option(
        False, help="keys are in the Redis of --registry, too; `moonserve keys` writes them"
    )
    registry: str | None = option(
        None,
        help="where several conductors agree which of them leads, and gateways share limits and keys: redis://…, "
        "redis+sentinel://…; for conductors alone also the host:port of a directory",
        masked=True,
    )
    requests_per_minute: int | None = option(
        None,
        help="of each key that has no limit of its own; of all clients where there are no keys",
    )
    tokens_per_minute: int | None = option(None, help="likewise, of prompts and answers together")
    max_streams: int | None = option(None, help="likewise, requests under way at once")
    max_prompt_tokens: int | None = option(
        None, help="longest prompt that is accepted; what the model's context holds when not given"
    )
    tool_call_parser: str = option(
        "auto",
        help="how the model writes tool calls; auto = as its chat template shows",
        choices=("auto", "none", *FORMATS),
    )
    enable_auto_tool_choice: bool = option(True, help="let the model choose whether to call tools (tool_choice auto)")
    max_body_bytes: int = option(8 * 2**20, help="longest request body that is accepted", unit="bytes")
    response_store_bytes: int = option(
        64 * 2**20,
        help="memory of a gateway for responses of /v1/responses that later ones continue; 0 = none is kept",
        unit="bytes",
    )
    max_connections: int | None = option(
        None,
        help="connections of a gateway at once, beyond which clients are answered 503; what the operating system's "
        "limit of open files leaves when not given",
    )
    max_header_bytes: int = option(32 * 2**10, help="longest head of a request that is accepted", unit="bytes")
    header_timeout_s: float = option(10.0, help="seconds within which the head of a request must have arrived")
    body_timeout_s: float = option(30.0, help="seconds within which a request's body must have arrived")
    request_timeout_s: float = option(600.0, help="seconds after which a request is ended")
    worker_patience_s: float = option(
        PATIENCE_S,
        help="seconds that a request waits for a worker, where there was one until a moment ago: they are restarted",
    )
    slow_client_s: float = option(30.0, help="seconds without reading after which a client is given up")

    def check_clients(self) -> None:
        """Raises ConfigError, which never quotes a key."""
        self.fixed_keys()
        for name in (
            "requests_per_minute",
            "tokens_per_minute",
            "max_streams",
            "max_prompt_tokens",
            "max_connections",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("max_header_bytes", "header_timeout_s", "body_timeout_s", "slow_client_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive")
        if self.api_keys_in_registry and self.redis_url is None:
            raise ConfigError(
                "--api-keys-in-registry needs --registry redis://…; a directory's registry forgets when it restarts, "
                "so it keeps no keys: have them in --api-key-file"
            )

    def fixed_keys(self) -> list[ApiKey]:
        """Returns the keys given by flags. Raises ConfigError."""
        named = parse_tenant_keys(self.tenant_keys)
        keys = [ApiKey(digest=digest_of(key.encode())) for key in self.api_key]
        # If a key is given twice, the tenant's counts.
        return keys + [ApiKey(digest=digest_of(key.encode()), tenant=tenant) for tenant, key in named.items()]

    @property
    def limits_for_all(self) -> KeyLimits:
        return KeyLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            streams=self.max_streams,
        )

    @property
    def redis_url(self) -> str | None:
        """URL of the registry if it is a Redis, else None."""
        scheme, separator, _ = (self.registry or "").partition("://")
        return self.registry if separator and scheme in SCHEMES else None


def parse_tenant_keys(entries: Sequence[str]) -> dict[str, str]:
    """Parses entries `tenant=key`, where keys may contain `=`. Raises ConfigError, which never quotes a key."""
    keys: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        tenant, _, key = entry.partition("=")
        if not tenant or not key or tenant in keys or key in keys.values():
            raise ConfigError(f"--tenant-keys: entry {number} must be tenant=key, each tenant and key once")
        keys[tenant] = key
    return keys


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig, ClientConfig, TracingConfig):
    """Options of `moonserve gateway`."""

    instance_id: str = option("gateway-0", help="name of this gateway in the cluster")
    port: int = option(8000, help="port of the OpenAI-compatible server; 0 lets the system choose")
    model: str = option(help="folder of the model; only its tokenizer and its configuration are read")
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
    def names(self) -> tuple[str, ...]:
        """Names of the model. The first one is used if a client names none."""
        return self.served_model_name or (Path(self.model).resolve().name,)

    @property
    def shares_port(self) -> bool:
        """True if connections that this gateway no longer accepts may reach another one."""
        return self.reuse_port or self.listen_fd is not None

    def __post_init__(self) -> None:
        self.check_clients()
        if self.reuse_port and self.listen_fd is not None:
            raise ConfigError("--reuse-port and --listen-fd exclude each other")
