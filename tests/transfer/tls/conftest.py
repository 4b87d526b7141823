"""Engines whose tcp is encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.authority import Authority, Files
from tests.transfer.conftest import TOKEN, PeerInProcess
from transfer import TransferEngine, TransferOptions


@pytest.fixture(scope="session")
def files(authority: Authority) -> Files:
    return authority.sign("engine", names="IP:127.0.0.1,DNS:anything")


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture
def make_engine(files: Files) -> Iterator[Callable[..., TransferEngine]]:
    """`files=` gives an engine others than the usual ones, None: no TLS."""
    engines: list[TransferEngine] = []

    def make(token: str = TOKEN, files: Files | None = files, **options: Any) -> TransferEngine:
        faults = options.pop("faults", None)
        options = {"transports": ("tcp",), **(files.options if files else {}), **options}
        engine = TransferEngine(
            cluster_token=token, faults=faults, options=TransferOptions(**options)
        )
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def peer(files: Files) -> Iterator[PeerInProcess]:
    process = PeerInProcess("tcp", *map(str, files.options.values()))
    yield process
    process.end()
