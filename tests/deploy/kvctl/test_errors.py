"""What goes wrong is one line that says what to do, and an exit code for scripts."""

from __future__ import annotations

import signal

import pytest

from deploy.kvctl.cluster import reason
from deploy.ports import free_port
from protocol.errors import PeerLost
from tests.deploy.kvctl.stage import ENVIRON, Kvctl, Stage, chain_keys, put, put_chain, stage
from tests.kvstore.nodes import running_node
from tests.patience import until
from tests.redis_server import RedisServer
from tests.stopping import stop


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
def test_what_cannot_be_is_one_line_and_an_exit_code(
    pair: Stage, capsys: pytest.CaptureFixture[str],
    registry: str | None, arguments: str, code: int, words: str,
) -> None:  # fmt: skip
    known = {"pair": pair.registry, "nobody": f"127.0.0.1:{free_port()}"}
    kvctl = Kvctl(capsys, "" if registry is None else registry.format(**known))
    said = kvctl(*arguments.format(**known).split())
    assert said.code == code
    [line] = said.err.splitlines()
    assert words in line


def test_registry_and_token_come_from_the_environment(pair: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    said = Kvctl(capsys)("nodes", environ={**ENVIRON, "MOONSERVE_REGISTRY": pair.registry})
    assert said.code == 0
    assert "store-1" in said.out
    said = Kvctl(capsys, pair.registry)("nodes", environ={"MOONSERVE_CLUSTER_TOKEN": "wrong"})
    assert said.code == 2
    assert "set MOONSERVE_CLUSTER_TOKEN" in said.err


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


def test_redis_is_a_registry_too_and_one_without_nodes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer() as redis:
        kvctl = Kvctl(capsys, redis.url)
        alone = kvctl("nodes")
        assert (alone.code, "moonserve store --join" in alone.err) == (1, True)
        with running_node("--dram", "1MiB", "--join", redis.url):
            until(lambda: kvctl("nodes").code == 0)  # a node is ready before it is a member
            [record] = kvctl.json("nodes")
    assert (record["node"], record["last_heard_s"]) == ("store-0", None)  # there is no directory


def test_help_lists_every_verb_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    listed = Kvctl(capsys)("--help").out
    verbs = "ls stat nodes replicas pin drop verify drain limit limits"
    assert all(f"    {verb} " in listed for verb in verbs.split())
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
