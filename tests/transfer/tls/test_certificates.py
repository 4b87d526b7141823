"""Files that cannot work are refused when the engine starts, and the message says what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.authority import Authority, Files, openssl
from tests.transfer.conftest import TOKEN
from transfer import TransferEngine, TransferOptions


def refusal(files: Files) -> str:
    with pytest.raises(ConfigError) as caught:
        TransferEngine(cluster_token=TOKEN, options=files.transfer_options()).start()
    return str(caught.value)


def test_without_files_there_is_no_tls() -> None:
    assert TransferOptions().tls_files is None


def test_files_come_all_three_or_not_at_all(files: Files) -> None:
    with pytest.raises(ConfigError, match="certificate, a key and an authority"):
        TransferOptions(tls_certificate=files.certificate)


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_missing_file_is_named(files: Files, name: str) -> None:
    missing = Path("/nowhere/missing.pem")
    assert "/nowhere/missing.pem: No such file" in refusal(replace(files, **{name: missing}))


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_a_file_that_is_no_pem_is_named(files: Files, name: str, tmp_path: Path) -> None:
    (nonsense := tmp_path / "nonsense.pem").write_text("nonsense")
    assert str(nonsense) in refusal(replace(files, **{name: nonsense}))


def test_a_key_of_another_certificate_is_told(files: Files, authority: Authority) -> None:
    other = authority.sign("other")
    message = refusal(replace(files, key=other.key))
    assert "do not belong together" in message
    assert str(other.key) in message


def test_a_key_behind_a_password_does_not_wait_for_one(files: Files, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    openssl(f"pkey -in {files.key} -aes256 -passout pass:secret -out {locked}")
    assert "password" in refusal(replace(files, key=locked))


def test_a_certificate_that_peers_would_refuse_is_refused_at_start(
    files: Files, authority: Authority, tmp_path: Path
) -> None:
    assert "expired" in refusal(authority.sign("expired", days=-1))
    other = Authority(tmp_path, "other")
    assert str(other.certificate) in refusal(replace(files, authority=other.certificate))
