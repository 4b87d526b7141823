"""Tests of kvctl's verbs: output matches what nodes hold, changes reach every replica, each error is one line."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from moonserve.deploy.admin.kvctl_cluster import reason
from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.terminal import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from moonserve.engine.kv_cache.elastic_service import KvMemoryServicer
from moonserve.kvstore.client import plain_key
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.pb import worker_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import RpcServer
from tests.commands import Command
from tests.deploy.admin.conftest import ENVIRON, SEGMENT_BYTES, get_all, keep_member, kvctl_of, put, put_chain
from tests.engine.kv_cache.test_elastic_service import Worker
from tests.kvstore.faults.pool import Pool, held
from tests.kvstore.node.nodes import TOKEN, running_node
from tests.patience import until
from tests.redis_server import RedisServer


def test_ls_shows_the_requested_objects_and_counts_the_others(pair: Pool, kvctl: Command) -> None:
    put(pair, "store-0", {f"listed-{number}": b"value" for number in range(5)})
    put(pair, "store-1", {"big": bytes(200_000)})
    said = kvctl("ls", "--node", "store-0", "--limit", "2", ends=0)
    assert " ".join(said.lines[0].split()) == "key node tier size pin holds followers tenant"
    assert len(said.lines) == 3
    total = len(kvctl.json("ls", "--node", "store-0", "--limit", "0"))
    assert f"and {total - 2:,} more object" in said.err
    key = plain_key(b"big").hex()
    record = {record["key"]: record for record in kvctl.json("ls", "--limit", "0")}[key]
    assert (record["node"], record["bytes"], record["in_memory"]) == ("store-1", 200_000, True)
    [line] = [each for each in kvctl("ls", "--limit", "0").lines if each.startswith(key[:16])]
    assert "store-1  memory  195.3 KiB" in line
    assert key in kvctl("ls", "--long", "--limit", "0").out
    for only in (["--disk-only"], ["--tenant", "nobody"]):
        said = kvctl("ls", *only)
        assert (said.code, said.out, said.err) == (0, "", "no objects\n")


def test_stat_shows_an_object_and_its_chain_as_far_as_it_exists(pair: Pool, kvctl: Command) -> None:
    keys = put_chain(pair, "store-0", "stat", 5)
    [record] = kvctl.json("stat", keys[-1].hex())
    assert [replica["node"] for replica in record["replicas"]] == ["store-0"]
    assert [above["key"] for above in record["chain"]] == [key.hex() for key in keys[-2::-1]]
    assert record["reaches_head"]
    said = kvctl("stat", keys[-1].hex())
    assert f"parent   {keys[-2].hex()}" in said.lines
    assert "4 blocks above" in said.out
    assert "store-0 (memory)" in said.out
    assert kvctl("drop", keys[0].hex()).code == 0
    assert f"broken   {keys[0].hex()}" in kvctl("stat", keys[-1].hex()).out
    [record] = kvctl.json("stat", keys[-1].hex())
    assert not record["reaches_head"]


def test_a_plain_key_that_looks_like_a_block_key_is_found(pair: Pool, kvctl: Command) -> None:
    name = "0123456789abcdef0123456789abcdef"
    put(pair, "store-0", {name: b"value"})
    assert kvctl("stat", name).code == 1
    [record] = kvctl.json("stat", name, "--plain")
    assert record["key"] == plain_key(name.encode()).hex()


def test_nodes_lists_every_node_and_a_single_node_without_a_registry(
    pair: Pool, kvctl: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    put(pair, "store-0", {"counted": b"value"})
    first, second = kvctl.json("nodes")
    assert (first["node"], second["node"]) == ("store-0", "store-1")
    held = len(kvctl.json("ls", "--node", "store-0", "--limit", "0"))
    assert (first["capacity_bytes"], first["num_objects"]) == (SEGMENT_BYTES, held)
    assert first["address"] == pair.running["store-0"].rpc_address
    said = kvctl("nodes", "--long")
    assert all(each in said.out for each in (first["epoch"], first["host"], "of 8.0 MiB"))
    node = ("--node", pair.running["store-1"].rpc_address)
    for arguments in ((*node, "nodes"), ("nodes", *node)):
        [record] = kvctl_of(capsys).json(*arguments)
        assert record["node"] == "store-1"


def test_a_pin_holds_on_all_replicas_until_it_is_removed(pair: Pool, kvctl: Command) -> None:
    for node_id in pair.running:
        put(pair, node_id, {"pinned": b"value"})
    said = kvctl("pin", "pinned", "not-there", "--hard", ends=1)
    assert said.out == "pinned (hard) 1 object: 2 replicas on 2 nodes\n"
    assert "no such key: not-there" in said.err
    assert [r["pin"] for r in kvctl.json("replicas", "pinned")] == ["hard", "hard"]
    assert kvctl("pin", "pinned", "--none").code == 0
    assert [r["pin"] for r in kvctl.json("replicas", "pinned")] == ["none", "none"]
    for kinds in ([], ["--soft", "--hard"]):
        assert kvctl("pin", "pinned", *kinds).code == 2


def test_a_chain_is_pinned_up_to_its_head(pair: Pool, kvctl: Command) -> None:
    keys = put_chain(pair, "store-0", "pin", 4)
    assert kvctl("pin", keys[2].hex(), "--soft", "--chain").code == 0
    pins = [replica["pin"] for key in keys for replica in kvctl.json("replicas", key.hex())]
    assert pins == ["soft", "soft", "soft", "none"]


def test_a_dropped_object_is_gone_from_every_node(pair: Pool, kvctl: Command) -> None:
    for node_id in pair.running:
        put(pair, node_id, {"dropped": b"value"})
    said = kvctl("drop", "dropped")
    assert said.out == "dropped 1 object: 2 replicas on 2 nodes\n"
    assert not any(get_all(pair, node_id, ["dropped"]) for node_id in pair.running)
    assert kvctl("drop", "dropped").code == 1


def test_many_objects_are_dropped_only_with_yes(pair: Pool, kvctl: Command) -> None:
    keys = put_chain(pair, "store-0", "drop", 20)
    said = kvctl("drop", keys[4].hex(), "--chain-below", ends=2)
    assert "would drop 16 objects; confirm with --yes" in said.err
    assert kvctl("stat", keys[-1].hex()).code == 0
    assert kvctl("drop", keys[4].hex(), "--chain-below", "--yes").code == 0
    assert [kvctl("stat", key.hex()).code for key in keys[3:6]] == [0, 1, 1]


def test_replicas_of_chain_are_made_by_directory(
    pair: Pool, kvctl: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = put_chain(pair, "store-0", "replicas", 3)
    until(lambda: all(held(pair, keys)))
    said = kvctl("replicas", keys[-1].hex(), "2", ends=0)
    assert "created 3 replicas" in said.err
    for key in keys:
        assert {r["node"] for r in kvctl.json("replicas", key.hex())} == {"store-0", "store-1"}
    said = kvctl("replicas", keys[-1].hex(), "3", ends=1)
    assert "3 wanted, 2 there" in said.err
    said = kvctl_of(capsys)("--node", pair.running["store-0"].rpc_address, "replicas", keys[-1].hex(), "2", ends=2)
    assert "moonserve directory" in said.err


def test_verify_finds_a_flipped_byte_and_another_replica_serves(own_pair: Pool, own_kvctl: Command) -> None:
    value = bytes(range(256)) * 64
    first, second = own_pair.running.values()
    for node_id in own_pair.running:
        put(own_pair, node_id, {"doubled": value})
    first.flip_byte(7, SEGMENT_BYTES)
    said = own_kvctl("verify", ends=1)
    corrupt = f"corrupt {plain_key(b'doubled').hex()}, dropped"
    assert f"store-0: {corrupt}; still on store-1" in said.lines
    assert "store-1: 1 object checked, all good" in said.lines
    assert [get_all(own_pair, node_id, ["doubled"]) for node_id in own_pair.running] == [{}, {"doubled": value}]
    good = {"node": "store-1", "checked": 1, "total": 1, "corrupt": []}
    assert own_kvctl.json("verify", "--node", "store-1") == [good]
    second.flip_byte(7, SEGMENT_BYTES)
    assert f"store-1: {corrupt}; it was the only replica" in own_kvctl("verify").lines


@pytest.mark.parametrize(
    ("registry", "arguments", "code", "words"),
    [
        (None, "nodes", 2, "--registry URL (or set MOONSERVE_REGISTRY), or --node HOST:PORT"),
        ("{nobody}", "nodes", 3, "the registry"),
        ("redis://{nobody}", "nodes", 3, "the registry"),
        ("http://127.0.0.1:1", "nodes", 2, "unknown scheme"),
        ("{pair}", "stat nobody-has-this", 1, "no such key: nobody-has-this"),
        ("{pair}", "replicas nobody-has-this", 1, "no such key: nobody-has-this"),
        ("{pair}", "drop nobody-has-this", 1, "no such key: nobody-has-this"),
        ("{pair}", "pin --soft nobody-has-this", 1, "no such key: nobody-has-this"),
        ("{pair}", "stat 0123456789abcdef", 1, "--long shows all 32"),
        ("{pair}", "ls --node store-7", 2, "known: store-0, store-1"),
        ("{pair}", "ls --node {pair}", 3, "another kind of process"),
        ("{pair}", "replicas some-key 0", 2, "N must be at least 1"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    pair: Pool, capsys: pytest.CaptureFixture[str],
    registry: str | None, arguments: str, code: int, words: str,
) -> None:  # fmt: skip
    known = {"pair": pair.registry, "nobody": f"127.0.0.1:{free_port()}"}
    kvctl = kvctl_of(capsys, *([] if registry is None else ["--registry", registry.format(**known)]))
    said = kvctl(*arguments.format(**known).split())
    assert said.code == code
    [line] = said.err.splitlines()
    assert words in line


def test_registry_and_token_come_from_the_environment(pair: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    said = kvctl_of(capsys)("nodes", environ={**ENVIRON, "MOONSERVE_REGISTRY": pair.registry}, ends=0)
    assert "store-1" in said.out
    said = kvctl_of(capsys, "--registry", pair.registry)("nodes", environ={"MOONSERVE_CLUSTER_TOKEN": "wrong"}, ends=2)
    assert "set MOONSERVE_CLUSTER_TOKEN" in said.err


def test_a_lost_node_does_not_hide_the_others(own_pair: Pool, own_kvctl: Command) -> None:
    put(own_pair, "store-0", {"here": b"value"})
    address = own_pair.running["store-1"].rpc_address
    own_pair.kill("store-1")
    asyncio.run(keep_member(own_pair, "store-1"))
    for verb in (["nodes"], ["ls"], ["stat", "here"], ["pin", "here", "--soft"], ["verify"]):
        said = own_kvctl(*verb, ends=3)
        assert f"store-1 at {address}: connection refused" in said.err
        assert said.out
    lost = own_kvctl("--json", "nodes").records[1]
    assert "connection refused" in lost["lost"]
    assert "may hold" in own_kvctl("drop", "here").err


def test_a_stopped_node_delays_a_command_by_seconds_only(
    own_pair: Pool, own_kvctl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the command's own timeouts
    keys = put_chain(own_pair, "store-0", "stopped", 5)
    with own_pair.frozen("store-1"):
        asyncio.run(keep_member(own_pair, "store-1"))
        said = own_kvctl("stat", keys[-1].hex())
    assert said.code == 3
    assert "store-1" in said.err
    assert "no answer in time" in said.err
    assert "4 blocks above" in said.out


def test_redis_is_a_registry_and_one_without_nodes_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer() as redis:
        kvctl = kvctl_of(capsys, "--registry", redis.url)
        alone = kvctl("nodes")
        assert (alone.code, "moonserve store --join" in alone.err) == (1, True)
        with running_node("--dram", "1MiB", "--join", redis.url):
            until(lambda: kvctl("nodes").code == 0)  # a node is ready before it is a member
            [record] = kvctl.json("nodes")
    assert (record["node"], record["last_heard_s"]) == ("store-0", None)  # only a directory knows it


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("unavailable: Connection refused (111)", "is it running"),
        ("deadline_exceeded: Deadline Exceeded", "no answer in time"),
        ("unavailable: last error: connection attempt timed out", "no answer in time"),
        ("unavailable: Socket closed", "has it ended"),
        ("unimplemented: Method not found!", "another kind of process"),
        ("first line\nsecond line", "first line"),
    ],
)
def test_grpc_errors_are_put_in_plain_words(raw: str, shown: str) -> None:
    assert shown in reason(PeerLost(raw))
    assert "\n" not in reason(PeerLost(raw))


@asynccontextmanager
async def serving(worker: Worker | None) -> AsyncIterator[str]:
    """Serves a worker's KV memory RPCs and yields the address. None: a worker whose memory is fixed."""
    server = RpcServer(TOKEN)
    servicer = (
        KvMemoryServicer(None, lambda: None)
        if worker is None
        else KvMemoryServicer(worker.elastic_memory, worker.on_change)
    )
    worker_pb2_grpc.add_KvMemoryServicer_to_server(servicer, server.grpc)
    async with server.serving("127.0.0.1", 0, 0.0) as address:
        yield address


async def test_a_ceiling_is_changed_in_whole_pages_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker()
    page = worker.paging.page_bytes
    async with serving(worker) as address:
        kvctl = kvctl_of(capsys, "--node", address)
        [changed] = await asyncio.to_thread(kvctl.json, "limit", "worker", str(2 * page + 1))
        assert changed["ceiling_bytes"] == 2 * page
        assert worker.changed.is_set(), "who holds too much was told"
        assert await asyncio.to_thread(kvctl.json, "limits") == [{**changed, "worker": address}]
        table = (await asyncio.to_thread(kvctl, "limits", ends=EXIT_OK)).lines
        assert table[0].split()[:3] == ["worker", "role", "resident"]
        assert "its own" in table[1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["limit", "w", "1KiB"], "page"),
        (["limit", "w", "1TiB"], ""),  # more than the reserved address space
        (["limit", "w", "1MiB", "--floor", "2MiB"], "floor"),
        (["limit", "w", "--budget", "1GiB"], "budget"),  # shares no budget
        (["limit", "w"], "nothing to change"),
        (["limit", "w", "much"], "much"),
        (["--node", "worker-0", "limits"], "HOST:PORT"),
        ([], "set MOONSERVE_CLUSTER_TOKEN"),
        (None, "--elastic-kv-memory"),
    ],
)
async def test_an_impossible_limit_is_refused_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], asked: list[str] | None, words: str
) -> None:
    """Impossible limits, a missing token and a worker with fixed memory give an error and change nothing."""
    worker = Worker()
    before = worker.elastic_memory.limits()
    async with serving(None if asked is None else worker) as address:
        kvctl = partial(kvctl_of(capsys, "--node", address), environ={} if asked == [] else ENVIRON)
        said = await asyncio.to_thread(kvctl, *(asked or ["limit", "w", "1MiB"]), ends=EXIT_USAGE)
    assert words in said.err
    assert worker.elastic_memory.limits() == before


def test_a_missing_answer_has_another_exit_code_than_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    nobody, kvctl = f"127.0.0.1:{free_port()}", kvctl_of(capsys)
    assert kvctl("--node", nobody, "limits").code == EXIT_UNREACHABLE
    for asked in (["limits", "--url", f"http://{nobody}"], ["--url", f"http://{nobody}", "limits"]):
        assert "--url" in kvctl(*asked, ends=EXIT_UNREACHABLE).err
    said = kvctl("--url", f"http://{nobody}", "ls", ends=EXIT_USAGE)
    assert "--registry" in said.err  # `limits` is the only verb that works with a gateway
