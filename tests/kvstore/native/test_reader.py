"""Reads of another process's index through `MappedReader`."""

import ctypes
import mmap
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from moonserve.kvstore.index_layout import (
    HEADER,
    RETIRED_AT,
    SLOT,
    VERSION_AT,
    CopyResult,
    Entry,
    Geometry,
    IndexMoved,
    LocateStatus,
    NotCopied,
    Presence,
)
from moonserve.kvstore.published_index import IndexUnknown, KeyIndex, MappedReader
from moonserve.protocol.errors import Incompatible
from tests.kvstore.native import mutator
from tests.kvstore.native.mutator import key_of

DATA = bytes(random.Random(3).randbytes(1 << 16))


def index_of(entries: dict[int, Entry]) -> KeyIndex:
    index = KeyIndex()
    for number, entry in entries.items():
        index.insert(key_of(number), entry)
    return index


def slot_of(index: KeyIndex) -> int:
    """Returns the offset of the only entry of an index."""
    table = bytes(index.memory[HEADER.size :])
    return HEADER.size + next(at for at in range(0, len(table), SLOT.size) if any(table[at:][:48]))


def entry_at(offset: int | None, length: int = 1000, generation: int = 9) -> Entry:
    return Entry(1, generation, 77, length, offset)


def reader_of(index: KeyIndex, data: bytes = DATA) -> MappedReader:
    return MappedReader(index.memory.toreadonly(), memoryview(data))


def copy(reader: MappedReader, *numbers: int) -> tuple[CopyResult, np.ndarray]:
    """Copies keys into one row of 4096 bytes each. Returns the outcome and the rows."""
    into = np.zeros((len(numbers), 4096), np.uint8)
    addresses = np.array([row.ctypes.data for row in into], np.uint64)
    capacities = np.full(len(numbers), 4096, np.uint64)
    return reader.copy(b"".join(map(key_of, numbers)), addresses, capacities), into


def test_a_reader_finds_what_is_there() -> None:
    entries = {number: entry_at(256 * number) for number in range(100)}
    reader = reader_of(index_of(entries))
    assert [reader.find(key_of(number)) for number in range(100)] == list(entries.values())
    assert reader.find(key_of(100)) is None
    packed = b"".join(key_of(number) for number in (5, 100, 6))
    assert reader.exists(packed) == bytes([Presence.PRESENT, Presence.ABSENT, Presence.PRESENT])
    assert reader.exists(b"") == b""


BATCH = {
    1: entry_at(512, 1000),
    2: entry_at(None),
    3: entry_at(0, 4097),
    4: entry_at(256, 0),
    6: entry_at(len(DATA) - 256, 257),  # beyond the mapped data
    7: entry_at(len(DATA) - 256, 256),
}


def test_a_copied_batch_reports_the_result_of_each_key() -> None:
    copied, into = copy(reader_of(index_of(BATCH)), *range(1, 8))
    on_disk, too_small, absent, unknown = NotCopied.ON_DISK, NotCopied.TOO_SMALL, NotCopied.ABSENT, NotCopied.UNKNOWN
    assert copied.lengths.tolist() == [1000, on_disk, too_small, 0, absent, unknown, 256]
    assert bytes(into[0, :1000]) == DATA[512:1512]
    assert bytes(into[6, :256]) == DATA[-256:]
    assert not into[[1, 2, 3, 4, 5]].any()
    assert copied.checksums.tolist() == [77, 77, 77, 77, 0, 77, 77]
    assert copied.rows[2].tolist() == [9, 9, 9, 9, 0, 9, 9]


def located(reader: MappedReader, *numbers: int, budget: int = 1 << 20) -> tuple[list[list[int]], list[bytes]]:
    """Locates keys. Returns their rows, with the standing as a separate column, and the bytes of each piece."""
    count = len(numbers)
    rows, pieces = np.zeros((count, 4), np.uint64), np.zeros((count, 2), np.uint64)
    rooms = np.full(count, 4096, np.uint64)
    num_pieces = reader.locate(b"".join(map(key_of, numbers)), rooms, budget, rows, pieces)
    told = [[extent >> 32, extent & 2**32 - 1, *rest] for _, extent, *rest in rows.tolist()]
    return told, [ctypes.string_at(address, nbytes) for address, nbytes in pieces[:num_pieces].tolist()]


def test_locate_returns_the_memory_of_objects_that_fit() -> None:
    """Objects that are too large, over budget, on disk, absent or out of bounds get a row, but no piece of memory."""
    entries = BATCH | {8: entry_at(1024, 1500)}
    told, pieces = located(reader_of(index_of(entries)), *range(1, 7), 8, 7, budget=1300)
    standings = "SENT ON_DISK IN_MEMORY SENT MISSING UNKNOWN IN_MEMORY SENT"
    assert [LocateStatus(row[0]).name for row in told] == standings.split()
    assert [row[1] for row in told] == [1000, 1000, 4097, 0, 0, 257, 1500, 256]
    assert all(row[2:] == ([0, 0] if row[0] == LocateStatus.MISSING else [77, 9]) for row in told)
    assert pieces == [DATA[512:1512], DATA[-256:]]


def test_calls_over_retired_memory_raise_index_moved() -> None:
    index = index_of({1: entry_at(0)})
    reader, memory = reader_of(index), index.memory
    for number in range(2, 200):
        index.insert(key_of(number), entry_at(0))
    assert memory[RETIRED_AT] == 1
    for call in (reader.find, reader.exists, lambda _: copy(reader, 1), lambda _: located(reader, 1)):
        with pytest.raises(IndexMoved):
            call(key_of(1))
    with pytest.raises(IndexMoved):
        MappedReader(memory, memoryview(DATA))


def test_a_writer_stopped_during_a_change_does_not_block_readers() -> None:
    index = index_of({1: entry_at(0, 100)})
    index.memory[VERSION_AT] |= 1
    reader = reader_of(index)
    assert reader.find(key_of(1)) == entry_at(0, 100)
    with pytest.raises(IndexUnknown):
        reader.find(key_of(2))
    packed = b"".join(map(key_of, range(1, 3000)))
    assert set(reader.exists(packed)[1:]) == {Presence.UNKNOWN}
    copied, _ = copy(reader, 1, 2)
    assert copied.lengths.tolist() == [100, NotCopied.UNKNOWN]


def test_an_entry_with_inconsistent_fields_is_ignored() -> None:
    index = index_of({1: entry_at(0)})
    offset = slot_of(index)
    for at in range(16, 48):
        index.memory[offset + at] ^= 4
        with pytest.raises(IndexUnknown):
            reader_of(index).find(key_of(1))
        index.memory[offset + at] ^= 4
    assert reader_of(index).find(key_of(1)) == entry_at(0)


def test_an_entry_that_moved_and_came_back_has_another_tag() -> None:
    index = index_of({1: entry_at(256)})
    slot = slice(slot_of(index), slot_of(index) + SLOT.size)
    before = bytes(index.memory[slot])
    index.relocate(key_of(1), None)
    index.relocate(key_of(1), 256)
    assert bytes(index.memory[slot]) != before
    assert index.find(key_of(1)) == entry_at(256)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        pytest.param(0, b"x", id="magic"),
        pytest.param(8, b"\x02", id="format"),
        pytest.param(24, b"\x00", id="no slots"),
        pytest.param(24, b"\xff" * 8, id="more slots than memory"),
        pytest.param(48, b"\xff" * 8, id="a longer tail than memory"),
    ],
)
def test_memory_that_is_not_an_index_is_refused(at: int, value: bytes) -> None:
    index = index_of({})
    index.memory[at : at + len(value)] = value
    with pytest.raises(Incompatible):
        reader_of(index)
    with pytest.raises(Incompatible):
        Geometry.parse(b"", 0)


def test_a_search_of_a_full_table_ends_at_its_last_slot() -> None:
    index = index_of({1: entry_at(0)})
    offset = slot_of(index)
    slot = bytes(index.memory[offset : offset + 48])
    index.memory[64:] = slot * ((len(index.memory) - 64) // 48)
    assert reader_of(index).find(key_of(2)) is None


def test_arrays_of_a_wrong_shape_or_type_are_refused() -> None:
    reader = reader_of(index_of({}))
    for wrong in (np.zeros(2, np.uint64), np.zeros(1, np.int64)):
        with pytest.raises(ValueError, match="uint64"):
            reader.copy(key_of(1), wrong, np.zeros(1, np.uint64))
        with pytest.raises(ValueError, match="uint64"):
            reader.copy(key_of(1), np.zeros(1, np.uint64), wrong)


@contextmanager
def mutating() -> Iterator[memoryview]:
    """Yields memory that another process changes all the time."""
    nbytes = 4 << 20
    fd = os.memfd_create("mutated")
    os.truncate(fd, nbytes)
    command = [sys.executable, "-m", mutator.__name__, str(fd), str(nbytes)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield memoryview(mmap.mmap(fd, nbytes))
        finally:
            process.kill()
            os.close(fd)


def reader_over(memory: memoryview) -> MappedReader:
    """Returns a reader over the index's current memory, and reports that memory to the mutator."""
    while True:
        (offset,) = mutator.WHERE.unpack_from(memory)
        data = memory[mutator.PAGE : mutator.DATA_END].toreadonly()
        try:
            reader = MappedReader(memory[offset:].toreadonly(), data)
        except IndexMoved:
            continue
        memory[mutator.READ_AT :][: mutator.WHERE.size] = mutator.WHERE.pack(offset)
        return reader


@pytest.mark.slow
def test_objects_copied_while_another_process_rewrites_them_are_whole() -> None:
    seen: Counter[str] = Counter()
    with mutating() as memory:
        reader = reader_over(memory)
        while seen["batches"] < 1500 or seen["retired"] < 2:
            seen["batches"] += 1
            try:
                seen.update(check_batch(reader))
            except IndexMoved:
                seen["retired"] += 1
                reader = reader_over(memory)
    assert seen["copied"] > 0


def check_batch(reader: MappedReader) -> Counter[str]:
    """Copies all changing keys, checks their contents, and counts the outcomes."""
    copied, into = copy(reader, *range(mutator.NUM_KEYS))
    lengths = copied.lengths.tolist()
    for number, length in enumerate(lengths):
        if length >= 0:
            content = mutator.content_of(number, int(copied.rows[2][number]))
            assert (into[number].view(np.uint64) == content).all()
            assert copied.checksums[number] == number
    assert NotCopied.ABSENT not in lengths[: mutator.NUM_STABLE]
    assert Presence.ABSENT not in reader.exists(b"".join(map(key_of, range(mutator.NUM_STABLE))))
    return Counter("copied" if length >= 0 else NotCopied(length).name for length in lengths)
