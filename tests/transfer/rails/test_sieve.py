"""The endpoint pool keeps what is used again and again, and never lets go of what is in use."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.rails.sieve import EndpointPool

keys = st.integers(0, 11)


def filled(cap: int, names: str, busy: set[str] | None = None) -> EndpointPool[str]:
    pool = EndpointPool[str](cap, (busy or set()).__contains__)
    for name in names:
        pool.add(name)
    return pool


def test_the_oldest_untouched_key_goes_first() -> None:
    pool = filled(3, "abc")
    pool.touch("a")
    assert pool.add("d") == "b"
    assert pool.add("e") == "c"
    pool.validate()


def test_the_hand_goes_on_where_it_stopped_and_clears_the_bits_it_passes() -> None:
    pool = filled(7, "GFEDCBA")
    for name in "ABG":
        pool.touch(name)
    assert pool.add("H") == "F"  # G's bit is cleared on the way
    pool.touch("A")
    pool.touch("D")
    assert pool.add("I") == "E"
    pool.touch("B")
    assert pool.add("J") == "C"  # D's bit is cleared
    pool.validate()


def test_what_is_used_in_every_round_survives_a_scan() -> None:
    pool = filled(8, "ab")
    evicted = []
    for number in range(100):
        pool.touch("a")
        pool.touch("b")
        evicted.append(pool.add(f"scan-{number}"))
    assert "a" in pool
    assert "b" in pool
    assert pool.evictions == len([key for key in evicted if key is not None]) == 94


def test_busy_keys_are_skipped_and_the_pool_grows_when_all_are() -> None:
    busy = {"a", "b"}
    pool = filled(2, "ab", busy)
    assert pool.add("c") is None
    assert len(pool) == 3
    assert pool.trim() == ["c"]
    assert pool.add("d") is None
    busy.clear()
    assert pool.trim() == ["a"]
    assert len(pool) == 2
    pool.validate()


def test_a_key_that_is_added_again_is_touched_and_evicts_nothing() -> None:
    pool = filled(2, "ab")
    assert pool.add("a") is None
    assert pool.add("c") == "b"


def test_removing_is_no_eviction_and_unknown_keys_are_ignored() -> None:
    pool = filled(2, "ab")
    pool.remove("a")
    pool.remove("never")
    pool.touch("never")
    assert pool.add("c") is None
    assert pool.evictions == 0
    pool.validate()


class Sieve:
    """SIEVE as the paper's listing has it, over a plain list: oldest first."""

    def __init__(self, cap: int) -> None:
        self.cap, self.queue, self.visited, self.hand = cap, list[int](), set[int](), 0

    def evict(self, busy: set[int]) -> int | None:
        if not set(self.queue) - busy:
            return None
        while True:
            self.hand %= len(self.queue)
            key = self.queue[self.hand]
            if key not in busy and key not in self.visited:
                self.remove(key)
                return key
            if key not in busy:
                self.visited.discard(key)
            self.hand += 1

    def remove(self, key: int) -> None:
        position = self.queue.index(key)
        del self.queue[position]
        self.visited.discard(key)
        if position < self.hand:
            self.hand -= 1
        if self.hand >= len(self.queue):
            self.hand = 0


class SieveMachine(RuleBasedStateMachine):
    """Any sequence of uses gives the evictions of the listing."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: set[int] = set()
        self.pool = EndpointPool[int](4, self.busy.__contains__)
        self.model = Sieve(4)

    @rule(key=keys)
    def add(self, key: int) -> None:
        expected = None
        if key in self.model.queue:
            self.model.visited.add(key)
        else:
            if len(self.model.queue) >= self.model.cap:
                expected = self.model.evict(self.busy)
            self.model.queue.append(key)
        assert self.pool.add(key) == expected

    @rule(key=keys)
    def touch(self, key: int) -> None:
        if key in self.model.queue:
            self.model.visited.add(key)
        self.pool.touch(key)

    @rule(key=keys)
    def remove(self, key: int) -> None:
        if key in self.model.queue:
            self.model.remove(key)
        self.pool.remove(key)
        self.busy.discard(key)

    @rule(key=keys)
    def start_or_end_using(self, key: int) -> None:
        if key in self.model.queue:
            self.busy ^= {key}

    @precondition(lambda self: len(self.model.queue) > self.model.cap)
    @rule()
    def trim(self) -> None:
        expected = []
        while len(self.model.queue) > self.model.cap:
            key = self.model.evict(self.busy)
            if key is None:
                break
            expected.append(key)
        assert self.pool.trim() == expected

    @invariant()
    def agree(self) -> None:
        self.pool.validate()
        assert len(self.pool) == len(self.model.queue)
        assert all(key in self.pool for key in self.busy)


TestSieveMachine = SieveMachine.TestCase
