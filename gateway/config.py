"""Configuration of the gateway. `moonserve serve` shares the options that concern clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonserve.gateway.access.api_key import ApiKey, KeyLimits, digest_of
from moonserve.gateway.generation.request_state import PATIENCE_S
from moonserve.gateway.text.message_syntax import REASONING_PARSERS
from moonserve.gateway.text.tool_call_parsers import FORMATS
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.membership.registry.redis_url import REDIS_SCHEMES
from moonserve.protocol.process.config import option, require_at_least_1
from moonserve.protocol.process.lifecycle import ProcessConfig
from moonserve.protocol.process.tracing import TracingConfig


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Options for clients: access, limits and timeouts."""

    api_key: tuple[str, ...] = option(
        (),
        help="API keys of clients; without any keys the gateway accepts all clients",
        masked=True,
    )
    tenant_keys: tuple[str, ...] = option(
        (),
        help="API keys of tenants, as alice=KEY,bob=KEY, besides --api-key; without them, `user` names the tenant",
        masked=True,
    )
    api_key_file: str | None = option(
        None, help="file of API keys that `moonserve keys` writes; changes apply within a second"
    )
    api_keys_in_registry: bool = option(
        False, help="also read API keys from the Redis of --registry; `moonserve keys` writes them"
    )
    registry: str | None = option(
        None,
        help="registry in which several conductors elect a leader, and gateways share limits and keys: redis://… or "
        "redis+sentinel://…; for conductors alone also the host:port of a directory",
        masked=True,
    )
    requests_per_minute: int | None = option(
        None,
        help="requests per minute of each key without its own limit; of all clients together if there are no keys",
    )
    tokens_per_minute: int | None = option(None, help="likewise, tokens per minute of prompts and outputs together")
    max_streams: int | None = option(None, help="likewise, concurrent requests")
    max_prompt_tokens: int | None = option(None, help="longest accepted prompt, tokens; default: the model's context")
    tool_call_parser: str = option(
        "auto",
        help="syntax of the model's tool calls; auto = detected from its chat template",
        choices=("auto", "none", *FORMATS),
    )
    reasoning_parser: str = option(
        "auto",
        help="syntax of the model's reasoning, which chats return as reasoning_content; auto = detected from its chat "
        "template; none = reasoning is content",
        choices=("auto", "none", *REASONING_PARSERS),
    )
    enable_auto_tool_choice: bool = option(True, help="let the model choose whether to call tools (tool_choice auto)")
    max_body_bytes: int = option(8 * 2**20, help="longest accepted request body", unit="bytes")
    response_store_bytes: int = option(
        64 * 2**20,
        help="memory of a gateway for stored responses of /v1/responses; 0 = stores none",
        unit="bytes",
    )
    max_connections: int | None = option(
        None,
        help="maximum connections of a gateway; further clients get 503; default: derived from the operating system's "
        "limit of open files",
    )
    max_header_bytes: int = option(32 * 2**10, help="longest accepted request head", unit="bytes")
    header_timeout_s: float = option(10.0, help="seconds within which the head of a request must arrive")
    body_timeout_s: float = option(30.0, help="seconds within which the body of a request must arrive")
    request_timeout_s: float = option(600.0, help="time limit of a request, seconds")
    worker_patience_s: float = option(
        PATIENCE_S,
        help="seconds that a request waits for the restart of a worker that was there until a moment ago",
    )
    slow_client_s: float = option(30.0, help="seconds without reading after which a client is disconnected")

    def check_clients(self) -> None:
        """Raises ConfigError, which never quotes a key."""
        self.fixed_keys()
        counts = ("requests_per_minute", "tokens_per_minute", "max_streams", "max_prompt_tokens", "max_connections")
        require_at_least_1(self, *(name for name in counts if getattr(self, name) is not None))
        for name in ("max_header_bytes", "header_timeout_s", "body_timeout_s", "slow_client_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive")
        if self.api_keys_in_registry and self.redis_url is None:
            raise ConfigError(
                "--api-keys-in-registry needs --registry redis://…; a directory loses its data when it restarts; "
                "use --api-key-file instead"
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
        return self.registry if separator and scheme in REDIS_SCHEMES else None


def parse_tenant_keys(entries: Sequence[str]) -> dict[str, str]:
    """Parses entries `tenant=key`, where keys may contain `=`. Raises ConfigError, which never quotes a key."""
    keys: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        tenant, _, key = entry.partition("=")
        if not tenant or not key or tenant in keys or key in keys.values():
            raise ConfigError(
                f"--tenant-keys: entry {number} must be tenant=key, with each tenant and each key only once"
            )
        keys[tenant] = key
    return keys


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig, ClientConfig, TracingConfig):
    """Options of `moonserve gateway`."""

    instance_id: str = option("gateway-0", help="name of this gateway in the cluster")
    port: int = option(8000, help="port of the OpenAI-compatible server; 0 lets the system choose")
    model: str = option(help="folder of the model; the gateway reads only its tokenizer and configuration")
    served_model_name: tuple[str, ...] = option((), help="names of the model for clients; default: the folder's name")
    reuse_port: bool = option(
        False,
        help="share the port with other gateways of this host and user; begin to listen when the cluster is ready",
    )
    listen_fd: int | None = option(
        None,
        help="inherited listening socket, bound to --host and --port and shared with other processes, so that "
        "connections wait while a gateway is replaced; set by serve",
    )
    drain_s: float = option(3.0, help="seconds that requests in flight get when the gateway stops")

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
