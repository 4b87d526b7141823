"""verify: a flipped byte is found, named and dropped; another replica still serves."""

from __future__ import annotations

import pytest

from kvstore.client import plain_key
from tests.deploy.kvctl.stage import SEGMENT_BYTES, Kvctl, Stage, get, put, stage
from tests.kvstore.nodes import running_node


def test_what_is_good_is_counted(pair: Stage, kvctl: Kvctl) -> None:
    put(pair.nodes["store-0"], {"good": b"value"})
    records = {record["node"]: record for record in kvctl.json("verify")}
    assert set(records) == {"store-0", "store-1"}
    held = len(kvctl.json("ls", "--node", "store-0", "--limit", "0"))
    assert records["store-0"] == {"node": "store-0", "checked": held, "total": held, "corrupt": []}
    assert "all good" in kvctl("verify", "--node", "store-0").out


def test_a_flipped_byte_is_found_and_the_other_replica_serves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = bytes(range(256)) * 64
    with stage(["store-0", "store-1"]) as made:
        for node in made.nodes.values():
            put(node, {"doubled": value})
        made.nodes["store-0"].flip_byte(7, SEGMENT_BYTES)
        kvctl = Kvctl(capsys, made.registry)
        said = kvctl("verify")
        assert said.code == 1
        corrupt = f"store-0: corrupt {plain_key(b'doubled').hex()}, dropped; still on store-1"
        assert corrupt in said.lines
        assert "store-1: 1 object checked, all good" in said.lines
        assert get(made.nodes["store-0"], "doubled") is None
        assert get(made.nodes["store-1"], "doubled") == value
        assert kvctl("verify").code == 0


def test_the_only_replica_of_what_was_corrupt_is_told_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_node("--dram", str(SEGMENT_BYTES)) as node:
        put(node, {"single": b"value"})
        node.flip_byte(0, SEGMENT_BYTES)
        said = Kvctl(capsys)("verify", "--node", node.rpc_address)
        assert said.code == 1
        assert "it was the only replica" in said.out
