"""What watch makes of a node's messages."""

from __future__ import annotations

from deploy.kvctl.changes import Change, Counts, Objects
from kvstore.client import plain_key
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2

FIRST, SECOND, THIRD = (plain_key(name) for name in (b"1", b"2", b"3"))
MEMORY, DISK = bytes([kvstore_pb2.STORE_TIER_MEMORY]), bytes([kvstore_pb2.STORE_TIER_DISK])


def message(
    *,
    added: bytes = b"",
    tiers: bytes = b"",
    removed: bytes = b"",
    read: bytes = b"",
    **flags: bool,
) -> kvstore_pb2.StoreEvents:
    return kvstore_pb2.StoreEvents(
        added_keys=added, added_tiers=tiers, removed_keys=removed, read_keys=read, **flags
    )


def changes(objects: Objects, sent: kvstore_pb2.StoreEvents) -> list[tuple[str, BlockKey, str]]:
    return [(change.what, change.key, change.tier) for change in objects.apply(sent)]


def test_an_inventory_in_pieces_is_no_change() -> None:
    objects = Objects()
    pieces = [
        message(added=FIRST, tiers=MEMORY, snapshot=True, more=True),
        message(added=SECOND, tiers=DISK, more=True),
        message(added=THIRD, tiers=DISK),
    ]
    assert [changes(objects, piece) for piece in pieces] == [[], [], []]
    assert len(objects) == 3
    assert changes(objects, message(removed=THIRD)) == [("removed", THIRD, "")]


def test_what_was_there_has_moved_and_what_was_not_is_new() -> None:
    objects = Objects()
    changes(objects, message(added=FIRST, tiers=MEMORY, snapshot=True))
    sent = message(added=FIRST + SECOND, tiers=DISK + MEMORY, read=SECOND)
    assert changes(objects, sent) == [
        ("moved", FIRST, "disk"),
        ("added", SECOND, "memory"),
        ("read", SECOND, ""),
    ]


def test_a_new_inventory_replaces_the_old_one() -> None:
    objects = Objects()
    changes(objects, message(added=FIRST + SECOND, tiers=MEMORY + MEMORY, snapshot=True))
    changes(objects, message(added=THIRD, tiers=MEMORY, snapshot=True))
    assert len(objects) == 1
    assert changes(objects, message(added=FIRST, tiers=MEMORY)) == [("added", FIRST, "memory")]


def test_counts_add_up() -> None:
    counts, total = Counts(), Counts()
    assert not counts
    counts.note(Change("read", FIRST))
    counts.note(Change("added", FIRST, "memory"))
    assert counts
    total.add(counts)
    total.add(counts)
    assert (total.added, total.moved, total.removed, total.read) == (2, 0, 0, 2)
