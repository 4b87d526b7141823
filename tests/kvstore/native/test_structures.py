"""Compares the native indexes, the rank heap and the holder kernel with models of Python containers."""

import dataclasses
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.kvstore import index_layout
from moonserve.kvstore.directory.block_table import WORD_BITS, Column, SlotIndex, leading_holders
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state.eviction.base import RankHeap
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.transfer.memory.data_plane import address_of
from tests.kvstore.native.mutator import key_of
from tests.thoroughness import any_order, examples

MAX_LOAD = 0.7  # MOST_LOADED_PERCENT of published_index.c


def entry_with(record: int, generation: int = 1) -> index_layout.Entry:
    return index_layout.Entry(record, generation, record * 7919, 4096, record * 256)


numbers = st.integers(0, 12) | st.integers(0, 300)
u32 = st.integers(0, index_layout.MAX_RECORDS - 1)
u64 = st.integers(0, 2**64 - 1)
offsets = st.none() | st.integers(0, 2**32 - 2).map(lambda place: place * 256)
entries = st.builds(
    index_layout.Entry,
    record=u32,
    generation=st.integers(1, 2**64 - 1),
    checksum=u64,
    length=st.integers(0, 2**32 - 1),
    offset=offsets,
)


class IndexMachine(RuleBasedStateMachine):
    """Compares a key index with a dict. The index grows beyond 45 entries."""

    @initialize()
    def make(self) -> None:
        self.retired: list[memoryview] = []
        self.index = KeyIndex(retire=self.retired.append)
        self.model: dict[BlockKey, index_layout.Entry] = {}

    @rule(number=numbers, entry=entries, times=st.sampled_from([1, 1, 1, 50]))
    def insert(self, number: int, entry: index_layout.Entry, times: int) -> None:
        for each in map(key_of, range(number, number + times)):
            if each not in self.model:
                self.index.insert(each, entry)
                self.model[each] = entry

    @rule(number=numbers, offset=offsets, times=st.sampled_from([1, 300]))
    def relocate(self, number: int, offset: int | None, times: int) -> None:
        key = key_of(number)
        if (entry := self.model.get(key)) is not None:
            for _ in range(times):
                self.index.relocate(key, offset)
            self.model[key] = dataclasses.replace(entry, offset=offset)

    @rule(number=numbers, times=st.sampled_from([1, 1, 20]))
    def remove(self, number: int, times: int) -> None:
        for each in map(key_of, range(number, number + times)):
            if self.model.pop(each, None) is not None:
                self.index.remove(each)

    @invariant()
    def agrees_with_the_model(self) -> None:
        keys = [key_of(number) for number in range(0, 360, 3)]
        assert [self.index.find(key) for key in keys] == [self.model.get(key) for key in keys]
        records = [self.model[key].record if key in self.model else index_layout.NO_RECORD for key in keys]
        assert self.index.records_in(b"".join(keys)).tolist() == records
        assert [self.index.record_of(key) for key in keys[:5]] == records[:5]
        assert len(self.index) == len(self.model)
        self.index.validate()


class HeapMachine(RuleBasedStateMachine):
    """Compares the rank heap with a dict. No two ranks are equal, as in eviction policies."""

    records = st.integers(0, 8) | st.integers(0, 500)
    primaries = st.sampled_from([0.0, 0.0, -1.5, 1e300]) | st.floats(-10, 10)

    @initialize()
    def make(self) -> None:
        self.heap = RankHeap()
        self.ranks: dict[int, tuple[float, int]] = {}
        self.offered: set[int] = set()
        self.clock = 2**63

    @rule(record=records, primary=primaries)
    def rank(self, record: int, primary: float) -> None:
        self.clock += 1
        self.heap.rank(record, primary, self.clock)
        self.ranks[record] = primary, self.clock

    @rule(ranked=st.lists(records, max_size=30))
    def rank_all(self, ranked: list[int]) -> None:
        self.heap.rank_all(np.array(ranked, np.int64), self.clock + 1)
        for record in ranked:
            self.clock += 1
            self.ranks[record] = 0.0, self.clock

    @rule(record=records)
    def offer(self, record: int) -> None:
        if record in self.ranks:
            self.heap.offer(record)
            self.offered.add(record)

    @rule(record=records)
    def discard(self, record: int) -> None:
        self.heap.discard(record)
        self.offered.discard(record)

    @rule()
    def drain(self) -> None:
        order = []
        while (record := self.heap.first()) != index_layout.NO_RECORD:
            order.append(record)
            self.heap.discard(record)
        assert order == sorted(self.offered, key=self.ranks.__getitem__)
        self.offered.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        least = min(self.offered, key=self.ranks.__getitem__, default=index_layout.NO_RECORD)
        assert self.heap.first() == least
        assert len(self.heap) == len(self.offered)
        assert all(self.heap.rank_of(record) == rank for record, rank in self.ranks.items())


TestIndex = any_order(IndexMachine, 20, derandomize=False)
TestHeap = any_order(HeapMachine, 20, derandomize=False)


def test_a_block_takes_at_most_86_bytes_of_the_index() -> None:
    index, beside = KeyIndex(), index_layout.NUM_TAIL * index_layout.SLOT.size + index_layout.HEADER.size
    for number in range(60_000):
        index.insert(key_of(number), entry_with(number))
        if number > 4096 * MAX_LOAD:
            assert (index.nbytes - beside) / (number + 1) <= 86


def test_an_index_that_grows_marks_and_gives_back_the_memory_it_leaves() -> None:
    given: list[memoryview] = []
    retired: list[memoryview] = []

    def allocate(nbytes: int) -> memoryview:
        given.append(memoryview(bytearray(nbytes)))
        return given[-1]

    index = KeyIndex(allocate, retired.append)
    for number in range(1000):
        index.insert(key_of(number), entry_with(number))
    assert retired == given[:-1]
    assert len(retired) > 3
    assert index.memory is given[-1]
    assert [memory[12] for memory in given] == [1] * len(retired) + [0]
    for memory in retired:
        memory.release()  # raises if it is still in use
    assert index.records_in(key_of(999) + key_of(1000)).tolist() == [999, index_layout.NO_RECORD]


def test_an_index_grows_early_when_entries_would_run_over_its_end() -> None:
    """An index grows early if its last slot is crowded. The smallest index cannot be; the keys crowd a larger one."""
    index = KeyIndex()
    geometry = index.geometry
    assert geometry.num_slots * MAX_LOAD < index_layout.NUM_TAIL
    sizes = [geometry.num_slots]
    while sizes[-1] * MAX_LOAD < index_layout.NUM_TAIL + 40:
        sizes.append(index_layout.next_num_slots(sizes[-1]))
    at_the_end = (key for key in map(key_of, count()) if home(key, geometry.seed, sizes[-1]) == sizes[-1] - 1)
    crowd = list(islice(at_the_end, index_layout.NUM_TAIL + 10))
    for record, key in enumerate(crowd):
        index.insert(key, entry_with(record))
    assert index.geometry.num_slots > sizes[-1]
    assert index.records_in(b"".join(crowd)).tolist() == list(range(len(crowd)))
    index.validate()


def home(key: BlockKey, seed: int, num_slots: int) -> int:
    """Returns the slot where published_index.c starts the search for `key`."""
    golden, word = 0x9E3779B97F4A7C15, 2**64 - 1

    def fold(a: int, b: int) -> int:
        return (a * b ^ a * b >> 64) & word

    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    mixed = fold(low ^ seed, high ^ (seed * golden & word)) ^ seed
    return fold(mixed, golden) * num_slots >> 64


@pytest.mark.parametrize("step", [1, 1 << 100, 2**64 + 1, (1 << 64) - 1])
def test_regular_keys_are_spread_like_random_ones(step: int) -> None:
    """Keys that count up in the low bits, in the high bits, or with equal or opposite halves are spread evenly."""
    seed, homes = 0x1234_5678_9ABC_DEF0, np.zeros(2000, np.int64)
    for number in range(20_000):
        homes[home(key_of(number * step), seed, 2000)] += 1
    chi_square = float((((homes - 10) ** 2) / 10).sum())
    assert abs(chi_square - 1999) < 6 * (2 * 1999) ** 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        *({"record": index_layout.MAX_RECORDS}, {"record": -1}, {"generation": 0}, {"generation": 2**64}),
        *({"checksum": 2**64}, {"length": 2**32}, {"offset": 255}, {"offset": 2**40}),
    ],
    ids=str,
)
def test_an_entry_that_does_not_fit_into_a_slot_is_refused(wrong: dict[str, int]) -> None:
    index = KeyIndex()
    with pytest.raises(ValueError, match=r"no slot|multiple"):
        index.insert(key_of(1), dataclasses.replace(entry_with(0), **wrong))
    assert index.find(key_of(1)) is None


def test_values_out_of_range_for_compiled_code_are_refused() -> None:
    index, short = KeyIndex(), BlockKey(b"short")
    for call in (index.find, index.record_of, index.remove, index.records_in):
        with pytest.raises(ValueError, match="bytes"):
            call(short)
    with pytest.raises(ValueError, match="record"):
        RankHeap().offer(-1)
    with pytest.raises(ValueError, match="record"):
        RankHeap().rank_all(np.array([0, -1]), 1)


def test_a_duplicate_insert_or_missing_key_raises_assertion_error() -> None:
    index = KeyIndex()
    index.insert(key_of(1), entry_with(1))
    with pytest.raises(AssertionError):
        index.insert(key_of(1), entry_with(2))
    for call in (index.remove, lambda key: index.relocate(key, 0)):
        with pytest.raises(AssertionError):
            call(key_of(2))


def column_of(num_rows: int, seed: int = 1) -> Column:
    """Returns a column of random keys."""
    keys = np.random.default_rng(seed).integers(0, 256, (num_rows, KEY_BYTES), dtype=np.uint8)
    return keys.reshape(-1).view(np.dtype((np.void, KEY_BYTES)))


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_every_key_is_found_at_its_row_while_the_index_grows_and_shrinks() -> None:
    index, column = SlotIndex(), column_of(20_000)
    order = np.random.default_rng(2).permutation(20_000)
    for part in np.array_split(order, 30):
        index.insert(column, part)
    assert np.array_equal(index.find_all(column, column.tobytes()), np.arange(20_000))
    assert index.nbytes < 9 * len(index)
    index.remove(column, order[:15_000])
    left = np.sort(order[15_000:])
    found = index.find_all(column, column.tobytes())
    assert np.array_equal(np.flatnonzero(found != index_layout.NO_RECORD), left)
    assert np.array_equal(found[left], left)
    assert len(index) == 5_000


def test_rows_that_the_column_lacks_and_torn_keys_are_refused() -> None:
    index, column = SlotIndex(), column_of(10)
    for rows in (rows_of(10), rows_of(-1), rows_of(1).astype(np.int32)):
        with pytest.raises(ValueError, match="row"):
            index.insert(column, rows)
        with pytest.raises(ValueError, match="row"):
            index.remove(column, rows)
    with pytest.raises(ValueError, match="whole number"):
        index.find_all(column, bytes(KEY_BYTES + 1))
    index.remove(column, rows_of(5))  # absent
    index.insert(column, rows_of())
    assert len(index) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 199)), max_size=400))
@settings(max_examples=examples(40), deadline=None)
def test_any_order_of_changes_leaves_the_exact_index(changes: list[tuple[bool, int]]) -> None:
    """The index holds exactly the present rows, also after the column has moved."""
    index, column, present = SlotIndex(), column_of(200), set()
    for adds, row in changes:
        if adds and row not in present:
            index.insert(column, rows_of(row))
            present.add(row)
        elif not adds and row in present:
            index.remove(column, rows_of(row))
            present.discard(row)
    moved = column.copy()
    column[:] = bytes(KEY_BYTES)
    found = index.find_all(moved, moved.tobytes())
    assert set(np.flatnonzero(found != index_layout.NO_RECORD).tolist()) == present
    assert all(found[row] == row for row in present)
    assert len(index) == len(present)


NUM_ROWS = 8
# Mostly all ones: many instances hold a prefix, and runs must not all be 0.
words = st.sampled_from([2**64 - 1, 2**63, 1, 0, 2**64 - 2, 0xF0F0])


@given(
    columns=st.lists(st.lists(words, min_size=NUM_ROWS, max_size=NUM_ROWS), min_size=1, max_size=3),
    rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=20),
)
def test_runs_are_those_of_a_loop_over_all_bits(columns: list[list[int]], rows: list[int]) -> None:
    table = [np.array(column, np.uint64) for column in columns]
    places = np.array(rows, np.int64)
    held, runs = leading_holders(np.array(list(map(address_of, table)), np.uint64), places)
    assert held.tolist() == [column[places].tolist() for column in table]
    for bit in range(WORD_BITS * len(columns)):
        word, mask = divmod(bit, WORD_BITS)
        has = [bool(columns[word][row] & 1 << mask) for row in rows]
        expected = has.index(False) if False in has else len(has)
        assert runs[bit] == expected
