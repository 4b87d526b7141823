"""Certificates of a cluster that exists for these tests only."""

from __future__ import annotations

import pytest

from protocol.tls import Certificates, load
from tests.authority import Authority


@pytest.fixture(scope="session")
def tls(authority: Authority) -> Certificates:
    return load(authority.sign("member", names="IP:127.0.0.1").tls)
