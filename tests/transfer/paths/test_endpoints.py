"""The endpoint pool keeps what is used again and again, and never lets go of what is in use."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.paths.endpoints import Endpoints

CAP = 4
numbers = st.integers(0, 11)


@dataclass(eq=False)
class FakeEndpoint:
    idle: bool = True
    is_open: bool = False

    def disconnect_when_idle(self) -> None:
        assert self.idle
        self.is_open = False


class Sieve:
    """SIEVE as the paper's listing has it, over a plain list: oldest first."""

    def __init__(self) -> None:
        self.queue, self.visited, self.hand = list[int](), set[int](), 0

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
    """Any sequence of uses gives the evictions of the listing; more than the cap only while all are busy."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoints = [FakeEndpoint() for _ in range(12)]
        self.pool = Endpoints(CAP)
        self.model = Sieve()

    @property
    def busy(self) -> set[int]:
        return {number for number, each in enumerate(self.endpoints) if not each.idle}

    @rule(number=numbers)
    def open_or_use(self, number: int) -> None:
        endpoint = self.endpoints[number]
        if endpoint.is_open:
            self.model.visited.add(number)
            self.pool.used(endpoint)
            return
        if len(self.model.queue) >= CAP:
            self.model.evict(self.busy)
        self.model.queue.append(number)
        endpoint.is_open = True
        self.pool.opened(endpoint)

    @rule(number=numbers)
    def close(self, number: int) -> None:
        endpoint = self.endpoints[number]
        if endpoint.is_open:
            self.model.remove(number)
        self.pool.closed(endpoint)
        self.pool.used(endpoint)  # too late, and ignored
        endpoint.is_open, endpoint.idle = False, True

    @rule(number=numbers)
    def start_or_end_work(self, number: int) -> None:
        endpoint = self.endpoints[number]
        endpoint.idle = not endpoint.idle or not endpoint.is_open

    @rule()
    def trim(self) -> None:
        while len(self.model.queue) > CAP and self.model.evict(self.busy) is not None:
            pass
        self.pool.trim()

    @invariant()
    def agree(self) -> None:
        assert len(self.pool) == len(self.model.queue)
        opened = [number for number, each in enumerate(self.endpoints) if each.is_open]
        assert opened == sorted(self.model.queue)


TestSieveMachine = SieveMachine.TestCase
