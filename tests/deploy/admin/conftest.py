"""Pools for kvctl: nodes that join and stay members, objects in them, and a runner for the command."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from moonserve.deploy.admin.kvctl import main
from moonserve.kvstore.client import chain, plain_key
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.registry.client import connect_registry
from moonserve.protocol.membership.registry.redis_registry import RedisRegistry
from tests.commands import Command
from tests.kvstore.faults.pool import Pool, pool_with_directory, until_in_step
from tests.kvstore.node.nodes import TOKEN
from tests.patience import NEVER_S, PATIENCE_S, PatientChannels

SEGMENT_BYTES = 8 * 2**20
DRAM = ("--dram", str(SEGMENT_BYTES))
ENVIRON = {"MOONSERVE_CLUSTER_TOKEN": TOKEN}


async def keep_member(pool: Pool, node_id: str) -> None:
    """Extends the registration of a node, so that the registry still lists it long after it is lost."""
    registry = connect_registry(pool.registry, cluster_token=TOKEN)
    try:
        [member] = [m for m in await registry.members() if m.instance_id == node_id]
        await registry.renew(member, ttl_s=NEVER_S)
    finally:
        await registry.close()


def join(pool: Pool, node_id: str, *flags: str) -> None:
    """Starts another node, with flags of its own, and waits until the directory knows it."""
    pool.flags, pool.ssd = flags, ""
    pool.start(node_id)
    until_in_step(pool)


def kvctl_of(capsys: pytest.CaptureFixture[str], *begin: str) -> Command:
    """Returns a runner for kvctl."""
    return Command(capsys, main, *begin, environ=ENVIRON)


def put(pool: Pool, node_id: str, values: Mapping[str, bytes]) -> None:
    with pool.alone(node_id) as store:
        for key, value in values.items():
            store.put(key.encode(), value)


def get_all(pool: Pool, node_id: str, keys: Iterable[str]) -> dict[str, bytes]:
    """Returns the values that the node holds, verified with their checksums."""
    with pool.alone(node_id) as store:
        found = {key: store.get(key.encode()) for key in keys}
    return {key: value for key, value in found.items() if value is not None}


def put_chain(pool: Pool, node_id: str, name: str, length: int) -> list[BlockKey]:
    """Stores the beginning of a chain and returns its keys."""
    keys = [plain_key(f"{name}/{number}".encode()) for number in range(length)]
    with pool.alone(node_id) as store:
        store.batch_put((block, bytes(4096)) for block in chain(keys))
    return keys


@pytest.fixture(scope="package", autouse=True)
def _no_cluster_of_the_operator() -> Iterator[None]:
    """Removes the operator's registry settings from the environment, which the processes under test read too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOONSERVE_REGISTRY")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extends the command's RPC timeouts of a few seconds, which a busy machine may exceed."""
    for caller in (
        "moonserve.deploy.admin.drain_and_role",
        "moonserve.deploy.admin.kvctl",
        "moonserve.deploy.admin.kvctl_cluster",
        "moonserve.protocol.membership.registry.client",
    ):
        monkeypatch.setattr(f"{caller}.Channels", PatientChannels)
    monkeypatch.setitem(RedisRegistry.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool_with_directory(tmp_path_factory.mktemp("pair"), 2, *DRAM) as made:
        yield made


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[Pool]:
    """Two nodes for a test that ends, damages or drains one."""
    with pool_with_directory(tmp_path, 2, *DRAM) as made:
        yield made


@pytest.fixture
def kvctl(pair: Pool, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runner for commands on the cluster `pair`."""
    return kvctl_of(capsys, "--registry", pair.registry)


@pytest.fixture
def own_kvctl(own_pair: Pool, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runner for commands on the cluster `own_pair`."""
    return kvctl_of(capsys, "--registry", own_pair.registry)
