"""Certificates of a cluster that exists for these tests only."""

from __future__ import annotations

import shutil

import pytest

from protocol.tls import Certificates, load
from tests.transfer.tls.authority import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (.ci/system-packages)")
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Certificates:
    return load(authority.sign("member", names="IP:127.0.0.1").tls)
