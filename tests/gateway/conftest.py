"""A gateway over loopback in front of a scripted cluster, and one request's state without any."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from gateway.config import GatewayConfig
from gateway.events import Started
from gateway.server import serve
from gateway.state import RequestState
from gateway.text.tokenizer import Tokenizer, load_tokenizer
from protocol.process import Lifecycle
from tests.gateway.requests import arrived, new_state, placed
from tests.gateway.scripted_cluster import CLUSTER_TOKEN, ScriptedCluster
from tests.patience import PATIENCE_S

MODEL = Path(__file__).parents[2] / "models" / "demo"


class RecordingLifecycle(Lifecycle):
    """Lets a test wait for readiness."""

    def __init__(self) -> None:
        super().__init__(None)
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ready(self, **facts: str) -> None:
        self.url.set_result(facts["http"])


@contextlib.asynccontextmanager
async def running_gateway(cluster: ScriptedCluster, **options: object) -> AsyncIterator[str]:
    """The gateway's URL."""
    config = GatewayConfig(
        model=str(MODEL),
        port=0,
        conductor=cluster.address,
        cluster_token=CLUSTER_TOKEN,
        drain_s=0.2,
    )
    config = dataclasses.replace(config, **options)
    lifecycle = RecordingLifecycle()
    serving = asyncio.create_task(serve(config, lifecycle))
    await asyncio.wait(
        {serving, lifecycle.url}, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S
    )
    if serving.done():
        serving.result()
    try:
        yield lifecycle.url.result()
    finally:
        lifecycle.stopping.set()
        await serving


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@pytest.fixture
async def cluster(tokenizer: Tokenizer) -> AsyncIterator[ScriptedCluster]:
    made = ScriptedCluster(
        tokens=tokenizer.encode(" to be or not to be" * 200, add_special_tokens=False)
    )
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def url(cluster: ScriptedCluster) -> AsyncIterator[str]:
    async with running_gateway(cluster) as made:
        yield made


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as session:
        yield session


@pytest.fixture
def state() -> Iterator[RequestState]:
    made = new_state()
    made.handle(Started(), 0.0)
    yield made
    made.validate()


@pytest.fixture
def decoding(state: RequestState) -> RequestState:
    placed(state)
    arrived(state, 0)
    arrived(state, 1)
    return state
