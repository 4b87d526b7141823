"""Reservations, leases, expiries, evictions and removals in any interleaving, against what was promised."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.allocator import ALIGNMENT
from kvstore.eviction import DEFAULT_POLICY, POLICY_NAMES
from kvstore.promises import Outcome, Wish
from kvstore.stored import Tier, Watermarks
from protocol.errors import StaleLease
from protocol.keys import BlockKey
from tests.kvstore.states import make_state
from tests.thoroughness import examples

NUM_CHAINS, DEPTH = 3, 4
TTL_S = 10.0
chains = st.integers(0, NUM_CHAINS - 1)
sizes = st.sampled_from([0, 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT])


def key(chain: int, depth: int) -> BlockKey:
    return BlockKey(bytes([chain + 1, depth]).ljust(16, b"\0"))


@dataclass
class Announced:
    """The visible objects, and the law of eviction checked at each removal."""

    parents: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    explicit: bool = False  # a client removes, it is no eviction
    protected: set[BlockKey] = field(default_factory=set)  # under a lease

    def added(self, block: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        assert block not in self.parents
        self.parents[block] = parent

    def removed(self, block: BlockKey) -> None:
        del self.parents[block]
        if not self.explicit:
            assert block not in self.parents.values(), "evicted before its follower"
            assert block not in self.protected, "evicted under a lease"


class StoreRights(RuleBasedStateMachine):
    policy_name: str

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.heard = Announced()
        self.state = make_state(
            8 * ALIGNMENT,
            self.heard,
            policy=self.policy_name,
            watermarks=Watermarks(evict_above=0.9, evict_share=0.2),
        )
        self.open: dict[str, tuple[float, list[BlockKey]]] = {}  # id → expiry, granted
        self.committing: dict[str, list[BlockKey]] = {}
        self.closing: set[str] = set()
        self.leases: dict[str, tuple[float, list[tuple[BlockKey, int, int]]]] = {}
        self.hidden: set[int] = set()  # generations removed under a lease

    def _new_id(self) -> str:
        self.count += 1
        return f"id-{self.count}"

    @rule(chain=chains, first=st.integers(0, DEPTH - 1), size=sizes)
    def reserve(self, chain: int, first: int, size: int) -> None:
        reservation_id = self._new_id()
        wishes = [
            Wish(key=key(chain, d), parent=key(chain, d - 1) if d else None, length=size)
            for d in range(first, DEPTH)
        ]
        reservation = self.state.writers.reserve(reservation_id, wishes, TTL_S, self.now)
        for wish, slot in zip(wishes, reservation.slots, strict=True):
            assert (slot.outcome is Outcome.GRANTED) == (wish.key in reservation.objects)
        if reservation.objects:
            self.open[reservation_id] = (self.now + TTL_S, list(reservation.objects))
            assert (
                self.state.writers.reserve(reservation_id, wishes, TTL_S, self.now) is reservation
            )

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        reservation_id = data.draw(st.sampled_from(sorted(self.open)))
        expires_at, granted = self.open[reservation_id]
        chosen = data.draw(st.lists(st.sampled_from(granted), unique=True))
        try:
            assert (
                self.state.writers.commit(reservation_id, dict.fromkeys(chosen, 7), self.now)
                is None
            )
        except StaleLease:
            assert expires_at <= self.now
            return
        assert expires_at > self.now
        del self.open[reservation_id]
        self.committing[reservation_id] = chosen

    @precondition(lambda self: self.committing)
    @rule(data=st.data())
    def verified(self, data: st.DataObject) -> None:
        reservation_id = data.draw(st.sampled_from(sorted(self.committing)))
        chosen = self.committing.pop(reservation_id)
        corrupt = [block for block in chosen if data.draw(st.booleans())]
        self.state.writers.verified(reservation_id, corrupt, self.now)
        present = self.state.exists(chosen)
        assert present == [block not in corrupt for block in chosen]
        assert self.state.writers.commit(reservation_id, {}, self.now) == tuple(corrupt)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        reservation_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[reservation_id]
        assert self.state.writers.abort(reservation_id, self.now) is not None
        assert self.state.writers.abort(reservation_id, self.now) is None
        self.closing.add(reservation_id)

    @precondition(lambda self: self.closing)
    @rule(data=st.data())
    def closed(self, data: st.DataObject) -> None:
        reservation_id = data.draw(st.sampled_from(sorted(self.closing)))
        self.closing.discard(reservation_id)
        self.state.writers.closed(reservation_id, self.now)

    @rule(chain=chains)
    def lease(self, chain: int) -> None:
        lease_id = self._new_id()
        keys = [key(chain, depth) for depth in range(DEPTH)]
        present = self.state.exists(keys)
        granted = self.state.readers.lease(lease_id, keys, TTL_S, self.now)
        assert len(granted.objects) == ([*present, False].index(False))
        if granted.objects:
            places = [(o.key, o.offset, o.generation) for o in granted.objects]
            self.leases[lease_id] = (self.now + TTL_S, places)
            self._protect()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        expires_at, places = self.leases[lease_id]
        try:
            self.state.readers.renew(lease_id, TTL_S, self.now)
        except StaleLease:
            assert expires_at <= self.now
        else:
            assert expires_at > self.now
            self.leases[lease_id] = (self.now + TTL_S, places)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease_id]
        self._protect()
        self.state.readers.release(lease_id, self.now)
        self.state.readers.release(lease_id, self.now)

    @rule(chain=chains, depth=st.integers(0, DEPTH - 1), corrupt=st.booleans())
    def remove(self, chain: int, depth: int, corrupt: bool) -> None:
        block = key(chain, depth)
        was_present = self.state.exists([block])[0]
        self.heard.explicit = True
        assert len(self.state.remove([block], corrupt=corrupt)) == was_present
        self.heard.explicit = False
        assert self.state.exists([block]) == [False]
        self.hidden |= {g for _, held in self.leases.values() for k, _, g in held if k == block}
        self._protect()

    @rule(seconds=st.sampled_from([1.0, TTL_S / 2, TTL_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def timer_fires(self) -> None:
        given_up = {r.reservation_id for r in self.state.expire(self.now)}
        assert given_up == {r for r, (at, _) in self.open.items() if at <= self.now}
        for reservation_id in given_up:
            del self.open[reservation_id]
        self.closing |= given_up
        self.leases = {n: lease for n, lease in self.leases.items() if lease[0] > self.now}
        self._protect()
        next_deadline = self.state.next_deadline()
        assert next_deadline is None or next_deadline > self.now

    def _protect(self) -> None:
        self.heard.protected = {
            block
            for _, places in self.leases.values()
            for block, _, generation in places
            if generation not in self.hidden
        }

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.state.validate()
        usage = self.state.usage()
        assert usage.num_objects == len(self.heard.parents)

    @invariant()
    def no_two_leased_objects_share_space(self) -> None:
        places = {place for _, held in self.leases.values() for place in held}
        assert len({offset for _, offset, _ in places}) == len(places)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_right_is_kept_under_every_policy(name: str) -> None:
    machine = type("StoreRightsUnderPolicy", (StoreRights,), {"policy_name": name})
    # The rights do not depend on the policy: the default one is searched deeply, the others enough to meet evictions.
    num_examples = examples(40 if name == DEFAULT_POLICY else 10)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=num_examples, stateful_step_count=50, deadline=None),
    )
