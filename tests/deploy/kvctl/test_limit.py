"""`kvctl limit` and `limits` against a worker's own servicer: what is shown, changed, refused, and the exit codes.

With a whole cluster, by a worker's id: `tests/e2e/test_elastic_memory.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deploy.kvctl.main import main as kvctl
from deploy.ports import free_port
from deploy.terminal.client import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from engine.elastic.serving import KvMemoryServicer
from protocol.pb import worker_pb2_grpc
from protocol.rpc import RpcServer
from tests.engine.elastic.test_elasticity import Worker

TOKEN = "secret"
ENVIRON = {"MOONSERVE_CLUSTER_TOKEN": TOKEN}


@asynccontextmanager
async def serving(worker: Worker | None) -> AsyncIterator[str]:
    """A worker's address; None: one whose memory is fixed."""
    server = RpcServer(TOKEN)
    servicer = (
        KvMemoryServicer(None, lambda: None)
        if worker is None
        else KvMemoryServicer(worker.elasticity, worker.on_change)
    )
    worker_pb2_grpc.add_KvMemoryServicer_to_server(servicer, server.grpc)
    address = await server.start("127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.stop(0.0)


async def test_a_ceiling_is_changed_in_whole_pages_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker()
    page = worker.paging.page_bytes
    async with serving(worker) as address:
        arguments = ["--node", address, "--json"]
        asked = ["limit", "worker", str(2 * page + 1)]
        assert await asyncio.to_thread(kvctl, [*arguments, *asked], ENVIRON) == EXIT_OK
        changed = json.loads(capsys.readouterr().out)
        assert changed["ceiling_bytes"] == 2 * page
        assert worker.changed.is_set(), "who holds too much was told"
        assert await asyncio.to_thread(kvctl, [*arguments, "limits"], ENVIRON) == EXIT_OK
        assert json.loads(capsys.readouterr().out) == {**changed, "worker": address}
        assert await asyncio.to_thread(kvctl, [*arguments[:2], "limits"], ENVIRON) == EXIT_OK
        table = capsys.readouterr().out.splitlines()
        assert table[0].split()[:3] == ["worker", "role", "resident"]
        assert "its own" in table[1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["limit", "w", "1KiB"], "page"),
        (["limit", "w", "1TiB"], ""),  # beyond the addresses
        (["limit", "w", "1MiB", "--floor", "2MiB"], "floor"),
        (["limit", "w", "--budget", "1GiB"], "budget"),  # shares none
        (["limit", "w"], "nothing to change"),
        (["limit", "w", "much"], "much"),
        (["--node", "worker-0", "limits"], "HOST:PORT"),
        ([], "set MOONSERVE_CLUSTER_TOKEN"),
        (None, "--elastic-kv-memory"),
    ],
)
async def test_what_cannot_be_is_refused_in_words_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], asked: list[str] | None, words: str
) -> None:
    """Also without a token, and by a worker whose memory is fixed."""
    worker = Worker()
    before = worker.elasticity.limits()
    async with serving(None if asked is None else worker) as address:
        arguments = ["--node", address, *(asked or ["limit", "w", "1MiB"])]
        environ = {} if asked == [] else ENVIRON
        assert await asyncio.to_thread(kvctl, arguments, environ) == EXIT_USAGE
    assert words in capsys.readouterr().err
    assert worker.elasticity.limits() == before


def test_a_worker_or_a_gateway_that_does_not_answer_is_told_apart_from_a_refusal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    assert kvctl(["--node", nobody, "limits"], ENVIRON) == EXIT_UNREACHABLE
    for asked in (["limits", "--url", f"http://{nobody}"], ["--url", f"http://{nobody}", "limits"]):
        assert kvctl(asked, ENVIRON) == EXIT_UNREACHABLE
        assert "--url" in capsys.readouterr().err
    assert kvctl(["--url", f"http://{nobody}", "ls"], ENVIRON) == EXIT_USAGE
    assert "--registry" in capsys.readouterr().err  # only limits are asked of a gateway
