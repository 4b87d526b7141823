"""The connector's settings (`kv_connector_extra_config`), and the namespace that fixes what stored bytes mean."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moonserve.kvstore.client.connecting import TOKEN_VARIABLE, default_options
from moonserve.protocol.errors import ConfigError
from moonserve.transfer import TransferOptions

_SAMPLE_BYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """Times in seconds."""

    cluster_token: str
    join: str = ""
    """URL of the store: `redis://…`, `host:port` of the directory, or `node://host:port`. Empty = no store, only
    hand-offs between prefill and decode servers."""
    host: str = ""
    """Address at which other servers reach this one. Empty = the address towards `join`, else loopback."""
    transports: tuple[str, ...] = ("shm", "tcp")
    model_id: str = ""
    """Identity of the weights. Empty = a digest of the files of a local model, or the hub's name and revision."""
    lease_s: float = 30.0
    """Time for which a prefill server holds a prompt's KV after its decode server was last heard of."""
    timeout_s: float = 10.0
    """Limit of one load or save. A load that takes longer is computed instead."""
    io_threads: int = 4
    max_pinned: float = 0.25
    """Share of the KV blocks that may wait to be stored; what a step computes beyond is not stored."""

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Raises ConfigError for unknown names and unusable values."""
        known = {each.name for each in fields(cls)} - {"cluster_token"}
        if unknown := sorted(set(extra) - known):
            raise ConfigError(f"unknown kv_connector_extra_config {unknown[0]!r}: there are {', '.join(sorted(known))}")
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ConfigError(f"no cluster token: set {TOKEN_VARIABLE} to the token of the store's cluster")
        values = dict(extra)
        if "transports" in values:
            values["transports"] = tuple(values["transports"])
        settings = cls(cluster_token=token, **values)
        if min(settings.lease_s, settings.timeout_s, settings.io_threads) <= 0 or not 0 < settings.max_pinned <= 1:
            raise ConfigError("lease_s, timeout_s and io_threads must be above 0, and max_pinned within 0 and 1")
        return settings

    def transfer_options(self) -> TransferOptions:
        """Slices have no checksums of their own: each block is verified by its reader."""
        host = self.host or (default_options(self.join).host if self.join else "127.0.0.1")
        return TransferOptions(host=host, transports=self.transports, checksums=False)


def model_identity(model: str, revision: str | None, config: Mapping[str, Any]) -> str:
    """Returns a digest of the model's configuration and of its weights: sizes and samples of local files, or the hub's
    name and revision."""
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    folder = Path(model)
    if folder.is_dir():
        for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
            _add_sample(digest, path)
    else:
        digest.update(f"{model}@{revision}".encode())
    return digest.hexdigest()


def _add_sample(digest: hashlib.blake2b, path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(f"{path.name} {size} ".encode())
        for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))


def namespace(parts: Iterable[object]) -> str:
    """Returns the digest of everything that fixes the meaning of a block's bytes, beside its tokens."""
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=16).hexdigest()
