"""Options of the gateway process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.config import option
from protocol.errors import ConfigError
from protocol.process import ProcessConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig):
    """`moonserve gateway`."""

    instance_id: str = option("gateway-0", help="name of this gateway in the cluster")
    port: int = option(8000, help="port of the OpenAI-compatible server; 0 lets the system choose")
    model: str = option(
        help="folder of the model; only its tokenizer and its configuration are read"
    )
    served_model_name: tuple[str, ...] = option(
        (), help="names under which clients ask for the model; by default the folder's name"
    )
    api_key: tuple[str, ...] = option(
        (), help="keys that clients may present; none = open to all", masked=True
    )
    tenant_keys: tuple[str, ...] = option(
        (),
        help="keys of tenants, as alice=KEY,bob=KEY, beside --api-key; without them a tenant is who `user` names",
        masked=True,
    )
    max_body_bytes: int = option(
        8 * 2**20, help="longest request body that is accepted", unit="bytes"
    )
    body_timeout_s: float = option(30.0, help="seconds within which a body must have arrived")
    request_timeout_s: float = option(600.0, help="seconds after which a request is ended")
    slow_client_s: float = option(
        30.0, help="seconds without reading after which a client is given up"
    )
    drain_s: float = option(3.0, help="seconds that requests under way get when the gateway stops")

    def __post_init__(self) -> None:
        self.keys_by_tenant()

    def keys_by_tenant(self) -> dict[str, str]:
        """Raises ConfigError, which does not say what the key is."""
        return parse_tenant_keys(self.tenant_keys)


def parse_tenant_keys(entries: Sequence[str]) -> dict[str, str]:
    """`tenant=key` each, where keys may hold more `=`. Raises ConfigError, which does not say what the key is."""
    keys: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        tenant, _, key = entry.partition("=")
        if not tenant or not key or tenant in keys or key in keys.values():
            raise ConfigError(
                f"--tenant-keys: entry {number} must be tenant=key, each tenant and key once"
            )
        keys[tenant] = key
    return keys
