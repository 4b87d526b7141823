"""Options that cannot be meant are refused before anything starts; KV has the process's TLS unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from transfer import TransferOptions
from transfer.config import Patience, TransferConfig

TLS = {name: f"{name}.pem" for name in ("tls_certificate", "tls_key", "tls_authority")}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (TransferOptions, {"transports": ()}, "no transports"),
        (TransferOptions, {"streams": 0}, "streams must be at least 1"),
        (TransferOptions, {"slice_bytes": -1}, "slice bytes must be at least 1"),
        (Patience, {"base_s": 0.0}, "above 0"),
        (Patience, {"slowest_bytes_s": 0}, "above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**options)


def test_kv_has_the_processes_tls_unless_it_is_told_otherwise() -> None:
    told = TransferConfig(**TLS).transfer_options("127.0.0.1").tls
    assert told is not None
    assert told.certificate == Path("tls_certificate.pem")
    assert TransferConfig(**TLS, transfer_tls=False).transfer_options("127.0.0.1").tls is None
    with pytest.raises(ConfigError, match="--no-transfer-tls"):
        TransferConfig(**TLS, transports=("rdma",)).transfer_options("127.0.0.1")
