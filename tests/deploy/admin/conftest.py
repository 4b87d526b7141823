"""Test cluster for kvctl: a directory, store nodes that join it, objects in them, and a runner for the command."""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonserve.deploy.admin.kvctl import main
from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import plain_key
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.objects import PutObject
from moonserve.protocol.kv_blocks import BlockKey, checksum
from moonserve.protocol.membership.redis_registry import RedisRegistry
from moonserve.protocol.membership.registry_client import connect_registry
from tests.kvstore.client.pools import store_of
from tests.kvstore.directory.cluster import asking, running_directory
from tests.kvstore.node.nodes import TOKEN, Node, connected, running_node
from tests.patience import NEVER_S, PATIENCE_S, PatientChannels, answered

SEGMENT_BYTES = 8 * 2**20
ENVIRON = {"MOONSERVE_CLUSTER_TOKEN": TOKEN}


@dataclass(slots=True)
class Stage:
    """The directory and the store nodes of one test cluster."""

    registry: str
    port: int
    nodes: dict[str, Node] = field(default_factory=dict)

    def address(self, name: str) -> str:
        return self.nodes[name].rpc_address

    @contextlib.contextmanager
    def joined(self, name: str, *flags: str) -> Iterator[Node]:
        """Starts a node and yields it once the directory knows it: a node is ready before it is a member."""
        with running_node(*flags, "--join", self.registry, instance_id=name) as node:
            self.nodes[name] = node
            asyncio.run(self.until_indexed([]))
            yield node

    async def keep_member(self, name: str) -> None:
        """Extends the registration of a node, so that the registry still lists it long after it is lost."""
        registry = connect_registry(self.registry, cluster_token=TOKEN)
        try:
            [member] = [m for m in await registry.members() if m.instance_id == name]
            await registry.renew(member, ttl_s=NEVER_S)
        finally:
            await registry.close()

    async def until_indexed(self, keys: Sequence[BlockKey]) -> None:
        """Waits until the directory has a holder for each of the keys."""
        async with asking(self.port) as questions:
            await questions.until_in_step(*self.nodes)
            await answered(lambda: questions.holders(keys), all)


@contextlib.contextmanager
def stage(names: Sequence[str], *flags: str) -> Iterator[Stage]:
    """Yields a running cluster with the named nodes. `flags`: command-line flags of every node."""
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(running_directory(port=port))
        made = Stage(f"127.0.0.1:{port}", port)
        for name in names:
            stack.enter_context(made.joined(name, "--dram", str(SEGMENT_BYTES), *flags))
        yield made


@dataclass(frozen=True, slots=True)
class Said:
    """The output and the exit code of one command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


class Kvctl:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], registry: str = "") -> None:
        self._capsys = capsys
        self._registry = registry

    def __call__(self, *arguments: str, ends: int | None = None, environ: Mapping[str, str] = ENVIRON) -> Said:
        """Runs the command. `ends`: the expected exit code; None accepts any."""
        registry = ["--registry", self._registry] if self._registry else []
        self._capsys.readouterr()
        code = main([*registry, *arguments], environ)
        printed = self._capsys.readouterr()
        assert ends in (None, code), printed.err
        return Said(code, printed.out, printed.err)

    def json(self, *arguments: str) -> list[dict[str, Any]]:
        """Returns the records that a command prints with --json; the command must succeed."""
        return self("--json", *arguments, ends=0).records


def put(node: Node, values: Mapping[str, bytes]) -> None:
    with store_of(f"node://{node.rpc_address}") as store:
        for key, value in values.items():
            store.put(key.encode(), value)


def get_all(node: Node, keys: Iterable[str]) -> dict[str, bytes]:
    """Returns the values that the node holds, verified with their checksums."""
    with store_of(f"node://{node.rpc_address}") as store:
        found = {key: store.get(key.encode()) for key in keys}
    return {key: value for key, value in found.items() if value is not None}


def chain_keys(name: str, length: int) -> list[BlockKey]:
    return [plain_key(f"{name}/{number}".encode()) for number in range(length)]


def put_chain(node: Node, keys: Sequence[BlockKey], num_bytes: int = 4096) -> None:
    async def body() -> None:
        async with connected(node.rpc_address) as (client, transfer, endpoint):
            local = transfer.allocate(num_bytes)
            local.buffer[:] = bytes(num_bytes)
            digest = checksum([local.buffer])
            parents = zip(keys, [None, *keys], strict=False)
            wishes = [PutObject(key=key, parent=parent, checksum=digest) for key, parent in parents]
            spots = BufferSlots.checked(local, [0] * len(wishes), [num_bytes] * len(wishes))
            assert (await client.put(endpoint, wishes, spots)).stored == len(keys)

    asyncio.run(body())


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
        "moonserve.protocol.membership.registry_client",
    ):
        monkeypatch.setattr(f"{caller}.Channels", PatientChannels)
    monkeypatch.setitem(RedisRegistry.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)


@pytest.fixture(scope="package")
def pair() -> Iterator[Stage]:
    with stage(["store-0", "store-1"]) as made:
        yield made


@pytest.fixture
def kvctl(pair: Stage, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """Runner for commands on the cluster `pair`."""
    return Kvctl(capsys, pair.registry)
