"""Options that cannot be meant are refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from transfer import TransferOptions

TLS = {name: Path(f"{name}.pem") for name in ("tls_certificate", "tls_key", "tls_authority")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transports": ()}, "no transports"),
        ({"streams": 0}, "streams must be at least 1"),
        ({"slice_bytes": -1}, "slice bytes must be at least 1"),
        ({"tls_key": Path("key.pem")}, "certificate, a key and an authority"),
        ({"transports": ("shm", "rdma"), **TLS}, "rdma cannot be encrypted"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransferOptions(**options)


def test_rails_are_told_apart_by_what_they_name() -> None:
    options = TransferOptions(rails=("10.0.0.1", "mlx5_0:1", "fd00::1"))
    assert options.tcp_rails == ("10.0.0.1", "fd00::1")
    assert options.rdma_rails == ("mlx5_0:1",)
