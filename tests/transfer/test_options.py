"""Options that cannot be meant are refused before anything starts; KV has the process's TLS unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from transfer import TransferOptions
from transfer.config import Patience, TransferConfig

TLS = {name: Path(f"{name}.pem") for name in ("tls_certificate", "tls_key", "tls_authority")}
OURS = {name: f"{name}.pem" for name in TLS}
OWN = {f"transfer_{name}": f"other_{name}.pem" for name in TLS}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (TransferOptions, {"transports": ()}, "no transports"),
        (TransferOptions, {"streams": 0}, "streams must be at least 1"),
        (TransferOptions, {"slice_bytes": -1}, "slice bytes must be at least 1"),
        (TransferOptions, {"tls_key": Path("key.pem")}, "certificate, a key and an authority"),
        (TransferOptions, {"transports": ("shm", "rdma"), **TLS}, "rdma cannot be encrypted"),
        (Patience, {"base_s": 0.0}, "above 0"),
        (Patience, {"slowest_bytes_s": 0}, "above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(
    kind: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**options)


def test_kv_has_the_processes_tls_unless_it_is_told_otherwise() -> None:
    told = TransferConfig(**OURS).transfer_tls_files()
    assert told is not None
    assert told.certificate == Path("tls_certificate.pem")
    told = TransferConfig(**OURS, **OWN).transfer_tls_files()
    assert told is not None
    assert told.key == Path("other_tls_key.pem")
    assert TransferConfig(**OURS, transfer_tls=False).transfer_tls_files() is None
    with pytest.raises(ConfigError, match="exclude each other"):
        TransferConfig(**OWN, transfer_tls=False).transfer_tls_files()
    with pytest.raises(ConfigError, match="--no-transfer-tls"):
        TransferConfig(**OURS, transports=("rdma",)).transfer_options("127.0.0.1")
