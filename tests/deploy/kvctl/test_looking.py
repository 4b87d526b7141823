"""ls, stat and nodes: what is shown is what the nodes hold."""

from __future__ import annotations

import pytest

from kvstore.client import plain_key
from tests.deploy.kvctl.stage import SEGMENT_BYTES, Kvctl, Stage, chain_keys, put, put_chain


def test_ls_stops_at_its_limit_and_says_how_many_more(pair: Stage, kvctl: Kvctl) -> None:
    put(pair.nodes["store-0"], {f"listed-{number}": b"value" for number in range(5)})
    said = kvctl("ls", "--node", "store-0", "--limit", "2")
    assert said.code == 0
    assert said.lines[0].split() == [
        "key",
        "node",
        "tier",
        "size",
        "pin",
        "holds",
        "followers",
        "tenant",
    ]
    assert len(said.lines) == 3
    total = len(kvctl.json("ls", "--node", "store-0", "--limit", "0"))
    assert f"and {total - 2:,} more object" in said.err


def test_ls_shows_each_object_with_its_node_and_size(pair: Stage, kvctl: Kvctl) -> None:
    put(pair.nodes["store-1"], {"big": bytes(200_000)})
    found = {record["key"]: record for record in kvctl.json("ls", "--limit", "0")}
    record = found[plain_key(b"big").hex()]
    assert (record["node"], record["bytes"], record["in_memory"]) == ("store-1", 200_000, True)
    lines = kvctl("ls", "--limit", "0").lines
    [line] = [line for line in lines if line.startswith(plain_key(b"big").hex()[:16])]
    assert "store-1  memory  195.3 KiB" in line
    whole = kvctl("ls", "--long", "--limit", "0")
    assert plain_key(b"big").hex() in whole.out


def test_ls_shows_only_what_was_asked_for(pair: Stage, kvctl: Kvctl) -> None:
    put(pair.nodes["store-0"], {"in-memory": b"value"})
    for only in (["--disk-only"], ["--tenant", "nobody"]):
        said = kvctl("ls", *only)
        assert (said.code, said.out, said.err) == (0, "", "no objects\n")


def test_stat_shows_an_object_and_its_chain_up_to_the_head(pair: Stage, kvctl: Kvctl) -> None:
    keys = chain_keys("stat", 5)
    put_chain(pair.nodes["store-0"], keys)
    [record] = kvctl.json("stat", keys[-1].hex())
    assert [replica["node"] for replica in record["replicas"]] == ["store-0"]
    assert [above["key"] for above in record["chain"]] == [key.hex() for key in keys[-2::-1]]
    assert record["reaches_head"]
    said = kvctl("stat", keys[-1].hex())
    assert f"parent   {keys[-2].hex()}" in said.lines
    assert "4 blocks above" in said.out
    assert "store-0 (memory)" in said.out


def test_stat_says_where_a_chain_is_broken(pair: Stage, kvctl: Kvctl) -> None:
    keys = chain_keys("broken", 3)
    put_chain(pair.nodes["store-0"], keys)
    assert kvctl("drop", keys[0].hex()).code == 0
    said = kvctl("stat", keys[-1].hex())
    assert f"broken   {keys[0].hex()}" in said.out
    [record] = kvctl.json("stat", keys[-1].hex())
    assert not record["reaches_head"]


def test_a_plain_key_that_looks_like_a_block_key_can_be_named(pair: Stage, kvctl: Kvctl) -> None:
    name = "0123456789abcdef0123456789abcdef"
    put(pair.nodes["store-0"], {name: b"value"})
    assert kvctl("stat", name).code == 1
    [record] = kvctl.json("stat", name, "--plain")
    assert record["key"] == plain_key(name.encode()).hex()


def test_nodes_shows_every_node_and_what_it_holds(pair: Stage, kvctl: Kvctl) -> None:
    put(pair.nodes["store-0"], {"counted": b"value"})
    records = {record["node"]: record for record in kvctl.json("nodes")}
    assert set(records) == {"store-0", "store-1"}
    first = records["store-0"]
    assert first["capacity_bytes"] == SEGMENT_BYTES
    assert first["num_objects"] == len(kvctl.json("ls", "--node", "store-0", "--limit", "0"))
    assert first["address"] == pair.address("store-0")
    said = kvctl("nodes", "--long")
    assert first["epoch"] in said.out
    assert first["host"] in said.out
    assert "of 8.0 MiB" in said.out


def test_a_node_can_be_asked_without_a_registry(
    pair: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Kvctl(capsys)
    [record] = alone.json("--node", pair.address("store-1"), "nodes")
    assert record["node"] == "store-1"
    [again] = alone.json("nodes", "--node", pair.address("store-1"))
    assert again["node"] == "store-1"
