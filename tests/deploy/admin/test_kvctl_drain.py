"""Tests of `kvctl drain`: each object that only the drained node holds is copied unchanged, or listed as unplaced."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.deploy.admin.kvctl_drain_plan import MAX_BYTES, MAX_KEYS, StoredObject, batches
from moonserve.kvstore.client import plain_key
from moonserve.kvstore.client.placement import Placement
from moonserve.protocol.errors import Overloaded
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.config import EXIT_INTERRUPTED
from tests.commands import Command
from tests.deploy.admin.conftest import DRAM, ENVIRON, SEGMENT_BYTES, get_all, join, kvctl_of, put, put_chain
from tests.kvstore.faults.pool import Pool, pool_with_directory
from tests.patience import PATIENCE_S, until
from tests.processes import ROOT


def key(number: int) -> BlockKey:
    return plain_key(str(number).encode())


def forest_of(shape: list[tuple[int, int, bool]]) -> dict[BlockKey, StoredObject]:
    """Returns objects by key. Each one's parent is the object `back` places before it, which may be absent; 0: none."""
    return {
        key(number): StoredObject(key(number), key(number - back) if back else None, length, in_memory=in_memory)
        for number, (back, length, in_memory) in enumerate(shape)
    }


LENGTHS = st.sampled_from([0, 1, MAX_BYTES // 40, 2 * MAX_BYTES])


@given(st.lists(st.tuples(st.integers(0, 8), LENGTHS, st.booleans()), max_size=200).map(forest_of))
def test_a_drain_copies_each_object_once_after_its_parent_in_bounded_batches(
    forest: dict[BlockKey, StoredObject],
) -> None:
    """Objects in memory are copied first, and a tree goes to one node."""
    asked: list[BlockKey] = []

    def target_of(first: StoredObject) -> str:
        assert first.parent not in forest
        asked.append(first.key)
        return f"node-{first.key[0] % 3}"

    planned = batches(forest, target_of)
    assert len(asked) == len(set(asked))
    where: dict[BlockKey, str] = {}
    for target, of_one in planned.items():
        assert all(0 < len(batch.objects) <= MAX_KEYS for batch in of_one)
        assert all(b.num_bytes <= MAX_BYTES or len(b.objects) == 1 for b in of_one)
        items = [item for batch in of_one for item in batch.objects]
        assert sorted(items, key=lambda item: not item.in_memory) == items
        for item in items:
            assert item.key not in where
            where[item.key] = target
            parent = None if item.parent is None else forest.get(item.parent)
            if parent is not None and parent.in_memory == item.in_memory:
                assert where[parent.key] == target, "a child before its parent, or elsewhere"
    assert where.keys() == forest.keys()
    for item in forest.values():
        assert item.parent not in forest or where[item.parent] == where[item.key]


def test_a_drain_copies_objects_in_a_circle() -> None:
    circle = {key(n): StoredObject(key(n), key((n + 1) % 3), 1) for n in range(3)}
    [batch] = batches(circle, lambda first: "node")["node"]
    assert len(batch.objects) == 3


# Runs the command as a separate process.
PATIENTLY = (sys.executable, "-m", "tests.deploy.admin.patient_kvctl")
VALUES = {f"value-{number}": os.urandom(10_000 + number) for number in range(100)}


def test_a_drained_node_can_be_stopped_without_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A draining node refuses writes. A chain goes to the node that holds its beginning and keeps its pins; every other
    object goes to the node where clients look for it."""
    with pool_with_directory(tmp_path, 3, *DRAM) as made:
        put(made, "store-0", VALUES)
        keys = put_chain(made, "store-0", "drained", 150)
        put_chain(made, "store-2", "drained", 10)
        kvctl = kvctl_of(capsys, "--registry", made.registry)
        for kind, key in (("--hard", keys[3]), ("--soft", keys[100])):  # store-2 holds only the first of the two
            assert kvctl("pin", key.hex(), kind, "--node", "store-0").code == 0
        said = kvctl("drain", "store-0", ends=0)
        assert "store-0 holds no object that only it has: it can be stopped" in said.lines
        assert "copied" not in kvctl("drain", "store-0").out
        assert kvctl.json("nodes")[0]["state"] == "draining"
        with pytest.raises(Overloaded):
            put(made, "store-0", {"during": b"value"})
        made.stop("store-0")
        held = {r["key"]: r for r in kvctl.json("ls", "--limit", "0")}
        chain = [held.pop(key.hex()) for key in keys]
        assert {r["node"] for r in chain} == {"store-2"}
        assert [r["parent"] for r in chain] == [None, *(key.hex() for key in keys[:-1])]
        assert (chain[3]["pin"], chain[100]["pin"]) == ("hard", "soft")
        placement = Placement(dict.fromkeys(("store-1", "store-2"), float(SEGMENT_BYTES)))
        for key, record in held.items():
            [[home, _]] = placement.ranked([BlockKey(bytes.fromhex(key))])
            assert placement.ids[home] == record["node"]
        assert get_all(made, "store-1", VALUES) | get_all(made, "store-2", VALUES) == VALUES


def test_a_drain_lists_objects_without_a_place_and_ignores_evictions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pool_with_directory(tmp_path, 1, *DRAM) as made:
        kvctl = kvctl_of(capsys, "--registry", made.registry)
        put(made, "store-0", {"large": bytes(3 * 2**20), "small": b"value"})
        said = kvctl("drain", "store-0", ends=1)
        assert "no other node accepts the objects of store-0" in said.err
        assert kvctl.json("nodes")[0]["state"] == "ok"
        join(made, "store-1", "--dram", "1MiB")
        said = kvctl("drain", "store-0", ends=1)
        assert "not placed:" in said.out
        assert "1 object (3.0 MiB) found no place" in said.err
        assert "still draining" in said.err
        [record] = kvctl("--json", "drain", "store-0").records
        assert not record["can_be_stopped"]
        assert len(record["unplaced"]) == 1
        undone = kvctl("drain", "store-0", "--undo")
        assert undone.out == "store-0 accepts objects again\n"
        put(made, "store-0", {f"cold-{n}": bytes(100_000) for n in range(40)})
        said = kvctl("drain", "store-0", ends=1)
        assert "they will evict what is cold there" in said.err


def test_a_drain_copies_objects_that_are_only_on_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Objects of three times the memory's size are drained. Write-through: none is evicted before it is on disk."""
    values = {f"cold-{n}": os.urandom(8) * 25_000 for n in range(120)}
    with pool_with_directory(tmp_path, 1, *DRAM, "--ssd-write-through", ssd="512MiB") as made:
        join(made, "store-1", "--dram", "64MiB")
        put_behind_the_disk(made, values)
        kvctl = kvctl_of(capsys, "--registry", made.registry)
        held = {record["key"] for record in kvctl.json("ls", "--limit", "0")}
        assert kvctl.json("ls", "--disk-only", "--limit", "0")
        [record] = kvctl.json("drain", "store-0")
        assert (record["copied"], record["gone"]) == (len(held), 0)
        found = get_all(made, "store-1", values)
    assert len(found) == len(held)
    assert found.items() <= values.items()


def put_behind_the_disk(pool: Pool, values: dict[str, bytes]) -> None:
    """Puts all values and retries refused ones: a node refuses while its memory is full of unwritten objects."""
    with pool.alone("store-0") as store:

        def taken(key: str) -> bool:
            with contextlib.suppress(Overloaded):
                store.put(key.encode(), values[key])
                return True
            return False

        for key in values:
            until(partial(taken, key))


def test_an_interrupted_drain_reports_the_rest_and_can_be_repeated(own_pair: Pool, own_kvctl: Command) -> None:
    """The drain waits for an unfinished write, so that the signal arrives while it runs."""
    put(own_pair, "store-0", VALUES)
    wishes: Any = [{"key": b"k" * 16, "length": 1}]
    begin = kvstore_pb2.StoreReserveRequest(reservation_id="unfinished", ttl_s=60.0, wishes=wishes)
    own_pair.ask("store-0", "Reserve", begin)
    words = [*PATIENTLY, "--registry", own_pair.registry, "drain", "store-0"]
    environ = {**os.environ, **ENVIRON}
    command = subprocess.Popen(words, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    assert command.stderr is not None
    assert any("waiting for writes" in line for line in command.stderr)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == EXIT_INTERRUPTED
    assert "interrupted: store-0 is still draining" in said
    assert own_kvctl.json("nodes")[0]["state"] == "draining"
    own_pair.ask("store-0", "Abort", kvstore_pb2.StoreAbortRequest(reservation_id="unfinished"))
    assert own_kvctl("drain", "store-0").code == 0
    assert get_all(own_pair, "store-1", VALUES) == VALUES
