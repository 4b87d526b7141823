"""pin, drop and replicas: what they change, on every node that holds the object."""

from __future__ import annotations

import pytest

from tests.deploy.kvctl.stage import Kvctl, Stage, chain_keys, get, put, put_chain


def pins(kvctl: Kvctl, *keys: bytes) -> list[set[str]]:
    """Of each key, those of its replicas."""
    return [
        {
            replica["pin"]
            for record in kvctl.json("stat", key.hex())
            for replica in record["replicas"]
        }
        for key in keys
    ]


def test_a_pin_is_on_all_replicas_until_it_is_taken_away(pair: Stage, kvctl: Kvctl) -> None:
    for node in pair.nodes.values():
        put(node, {"pinned": b"value"})
    said = kvctl("pin", "pinned", "--hard")
    assert said.out == "pinned (hard) 1 object: 2 replicas on 2 nodes\n"
    assert [r["pin"] for r in kvctl.json("replicas", "pinned")] == ["hard", "hard"]
    assert kvctl("pin", "pinned", "--none").code == 0
    assert [r["pin"] for r in kvctl.json("replicas", "pinned")] == ["none", "none"]


def test_a_chain_is_pinned_up_to_its_head(pair: Stage, kvctl: Kvctl) -> None:
    keys = chain_keys("pin", 4)
    put_chain(pair.nodes["store-0"], keys)
    assert kvctl("pin", keys[2].hex(), "--soft", "--chain").code == 0
    assert pins(kvctl, *keys) == [{"soft"}, {"soft"}, {"soft"}, {"none"}]


def test_what_is_there_is_pinned_and_what_is_not_is_named(pair: Stage, kvctl: Kvctl) -> None:
    put(pair.nodes["store-0"], {"there": b"value"})
    said = kvctl("pin", "there", "not-there", "--soft")
    assert said.code == 1
    assert "1 object" in said.out
    assert "no such key: not-there" in said.err


def test_pin_must_be_told_which_kind(kvctl: Kvctl) -> None:
    assert kvctl("pin", "there").code == 2
    assert kvctl("pin", "there", "--soft", "--hard").code == 2


def test_a_dropped_object_is_gone_from_every_node(pair: Stage, kvctl: Kvctl) -> None:
    for node in pair.nodes.values():
        put(node, {"dropped": b"value"})
    said = kvctl("drop", "dropped")
    assert said.out == "dropped 1 object: 2 replicas on 2 nodes\n"
    assert [get(node, "dropped") for node in pair.nodes.values()] == [None, None]
    assert kvctl("drop", "dropped").code == 1


def test_many_objects_are_dropped_only_when_it_is_meant(pair: Stage, kvctl: Kvctl) -> None:
    keys = chain_keys("drop", 20)
    put_chain(pair.nodes["store-0"], keys)
    said = kvctl("drop", keys[4].hex(), "--chain-below")
    assert said.code == 2
    assert "would drop 16 objects; add --yes" in said.err
    assert kvctl("stat", keys[-1].hex()).code == 0
    assert kvctl("drop", keys[4].hex(), "--chain-below", "--yes").code == 0
    assert [kvctl("stat", key.hex()).code for key in keys[3:6]] == [0, 1, 1]


def test_replicas_are_made_and_taken_away_with_their_chain(pair: Stage, kvctl: Kvctl) -> None:
    keys = chain_keys("replicas", 3)
    put_chain(pair.nodes["store-0"], keys)
    pair.until_indexed(keys)
    said = kvctl("replicas", keys[-1].hex(), "2")
    assert said.code == 0, said.err
    assert "created 3 replicas" in said.err
    for key in keys:
        assert {r["node"] for r in kvctl.json("replicas", key.hex())} == {"store-0", "store-1"}
    said = kvctl("replicas", keys[-1].hex(), "3")
    assert said.code == 1
    assert "3 wanted, 2 there" in said.err


def test_replicas_need_a_directory_and_a_number_above_zero(
    pair: Stage, kvctl: Kvctl, capsys: pytest.CaptureFixture[str]
) -> None:
    put(pair.nodes["store-0"], {"alone": b"value"})
    assert kvctl("replicas", "alone", "0").code == 2
    said = Kvctl(capsys)("--node", pair.address("store-0"), "replicas", "alone", "2")
    assert said.code == 2
    assert "moonserve directory" in said.err
