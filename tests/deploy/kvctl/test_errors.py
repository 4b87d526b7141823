"""What goes wrong is one line that says what to do, and an exit code for scripts."""

from __future__ import annotations

import signal

import pytest

from deploy.kvctl.cluster import reason
from protocol.errors import PeerLost
from tests.deploy.kvctl.stage import ENVIRON, Kvctl, Stage, chain_keys, put, put_chain, stage
from tests.kvstore.nodes import running_node
from tests.patience import until
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.stopping import stop


def test_a_cluster_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = Kvctl(capsys)("nodes")
    assert said.code == 2
    assert "--registry URL (or set MOONSERVE_REGISTRY), or --node HOST:PORT" in said.err
    assert len(said.err.splitlines()) == 1


def test_the_registry_may_come_from_the_environment(
    pair: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Kvctl(capsys)("nodes", environ={**ENVIRON, "MOONSERVE_REGISTRY": pair.registry})
    assert said.code == 0
    assert "store-1" in said.out


@pytest.mark.parametrize("scheme", ["", "redis://"])
def test_a_registry_that_is_away_is_told(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = Kvctl(capsys, f"{scheme}127.0.0.1:{free_port()}")("nodes")
    assert said.code == 3
    assert "the registry" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_registry_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    said = Kvctl(capsys, "http://127.0.0.1:1")("nodes")
    assert said.code == 2
    assert "unknown scheme" in said.err


def test_a_wrong_token_is_told_from_an_unreachable_cluster(pair: Stage, kvctl: Kvctl) -> None:
    said = kvctl("nodes", environ={"MOONSERVE_CLUSTER_TOKEN": "wrong"})
    assert said.code == 2
    assert "set MOONSERVE_CLUSTER_TOKEN" in said.err


def test_a_key_that_nobody_has_is_not_found(kvctl: Kvctl) -> None:
    for verb in (["stat"], ["replicas"], ["drop"], ["pin", "--soft"]):
        said = kvctl(*verb, "nobody-has-this")
        assert said.code == 1
        assert "no such key: nobody-has-this" in said.err


def test_digits_of_a_cut_key_are_recognised(kvctl: Kvctl) -> None:
    assert "--long shows all 32" in kvctl("stat", "0123456789abcdef").err


def test_a_node_that_nobody_knows_is_named_with_those_that_are(kvctl: Kvctl) -> None:
    said = kvctl("ls", "--node", "store-7")
    assert said.code == 2
    assert "known: store-0, store-1" in said.err


def test_a_process_that_is_no_store_node_is_recognised(pair: Stage, kvctl: Kvctl) -> None:
    said = kvctl("ls", "--node", pair.registry)
    assert said.code == 3
    assert "another kind of process" in said.err


def test_a_lost_node_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with stage(["store-0", "store-1"]) as made:
        put(made.nodes["store-0"], {"here": b"value"})
        made.nodes["store-1"].kill()
        made.keep_member("store-1")
        kvctl = Kvctl(capsys, made.registry)
        for verb in (["nodes"], ["ls"], ["stat", "here"], ["pin", "here", "--soft"], ["verify"]):
            said = kvctl(*verb)
            assert said.code == 3, verb
            assert f"store-1 at {made.address('store-1')}: connection refused" in said.err
            assert said.out
        lost = kvctl("--json", "nodes").records[1]
        assert "connection refused" in lost["lost"]
        assert "may still hold" in kvctl("drop", "here").err


def test_a_stopped_node_costs_seconds_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # no patience
    with stage(["store-0", "store-1"]) as made:
        keys = chain_keys("stopped", 5)
        put_chain(made.nodes["store-0"], keys)
        stopped = made.nodes["store-1"].process
        stop(stopped.pid)
        made.keep_member("store-1")
        try:
            said = Kvctl(capsys, made.registry)("stat", keys[-1].hex())
        finally:
            stopped.send_signal(signal.SIGCONT)
    assert said.code == 3
    assert "store-1" in said.err
    assert "no answer in time" in said.err
    assert "4 blocks above" in said.out


def test_a_cluster_without_store_nodes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with stage([]) as made:
        said = Kvctl(capsys, made.registry)("nodes")
    assert said.code == 1
    assert "moonserve store --join" in said.err


def test_redis_is_a_registry_too(capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer() as redis, running_node("--dram", "1MiB", "--join", redis.url):
        kvctl = Kvctl(capsys, redis.url)
        until(lambda: kvctl("nodes").code == 0)  # a node is ready before it is a member
        [record] = kvctl.json("nodes")
    assert record["node"] == "store-0"
    assert record["last_heard_s"] is None  # there is no directory


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    kvctl = Kvctl(capsys)
    listed = kvctl("--help").out
    for verb in ["ls", "stat", "nodes", "replicas", "pin", "drop", "verify", "drain", "watch"]:
        assert verb in listed
        assert kvctl(verb, "--help").code == 0
    assert "exit codes" in listed


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
def test_what_grpc_says_is_put_in_words(raw: str, shown: str) -> None:
    assert shown in reason(PeerLost(raw))
    assert "\n" not in reason(PeerLost(raw))
