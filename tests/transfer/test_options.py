"""Options that cannot be meant are refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from transfer import TransferOptions
from transfer.config import Patience, TransferConfig

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


def test_kv_has_the_processes_tls_unless_it_is_told_otherwise() -> None:
    ours = {name: f"{name}.pem" for name in TLS}
    own = {f"transfer_{name}": f"other_{name}.pem" for name in TLS}
    told = TransferConfig(**ours).transfer_tls_files()
    assert told is not None
    assert told.certificate == Path("tls_certificate.pem")
    told = TransferConfig(**ours, **own).transfer_tls_files()
    assert told is not None
    assert told.key == Path("other_tls_key.pem")
    assert TransferConfig(**ours, transfer_tls=False).transfer_tls_files() is None
    assert TransferConfig().transfer_tls_files() is None
    with pytest.raises(ConfigError, match="exclude each other"):
        TransferConfig(**own, transfer_tls=False).transfer_tls_files()
    with pytest.raises(ConfigError, match="--no-transfer-tls"):
        TransferConfig(**ours, transports=("rdma",)).transfer_options("127.0.0.1")


def test_time_grows_with_bytes_over_a_base() -> None:
    patience = Patience(base_s=2.0, slowest_bytes_s=1e6)
    assert patience.deadline_s(0) == 2.0
    assert patience.deadline_s(3_000_000) == 5.0


@pytest.mark.parametrize("wrong", [{"base_s": 0.0}, {"slowest_bytes_s": 0}])
def test_there_is_always_some_time_and_some_end(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Patience(**wrong)
