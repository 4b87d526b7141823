"""Compares a two-tier node with a model of its bytes in any interleaving of clients, moves, losses and restarts."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from moonserve.kvstore.disk.base import DiskObject, Pin
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.eviction import DEFAULT_POLICY, POLICY_NAMES
from moonserve.kvstore.state.objects import DiskReadMove, DiskWriteMove, PutOutcome, PutRequest
from moonserve.protocol.errors import StaleLease
from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from moonserve.protocol.request import NO_HINTS, CacheHints
from tests.kvstore.hardware import NOTHING
from tests.kvstore.state.two_tiers import DEPTH, NUM_CHAINS, QUOTA_UNITS, TwoTiersInTruth, blocks, key
from tests.thoroughness import examples

TTL_S = 10.0
chains = st.integers(0, NUM_CHAINS - 1)
depths = st.integers(0, DEPTH - 1)
sizes = st.sampled_from([0, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT])
pins = st.sampled_from([Pin.NONE, Pin.NONE, Pin.SOFT, Pin.HARD])
often = st.sampled_from([True, True, True, False])
tenants = st.sampled_from(["", "limited"])
expected, expiring = CacheHints(return_within_s=TTL_S), CacheHints(ttl_s=TTL_S, return_within_s=2 * TTL_S)
hints_of_puts = st.sampled_from([NO_HINTS, NO_HINTS, CacheHints(low_priority=True), expected, expiring])


class TwoTiers(TwoTiersInTruth):
    """The events that can happen to a node with two tiers; their order is arbitrary."""

    @initialize()
    def begin_with_both_tiers(self) -> None:
        """Fills both tiers, since most runs would otherwise end with little on disk."""
        for chain in range(NUM_CHAINS):
            self.put(chain, 0, ALIGNMENT, "", Pin.NONE, NO_HINTS, at_once=True)
            if chain < NUM_CHAINS - 1:
                self.demote(2**30, at_once=True)

    # Writers

    @rule(chain=chains, first=depths, size=sizes, tenant=tenants, pin=pins, at_once=st.booleans(), hints=hints_of_puts)
    def put(
        self, chain: int, first: int, size: int, tenant: str, pin: Pin, hints: CacheHints, *, at_once: bool
    ) -> None:
        name = f"put-{self.new_number()}"
        wishes = [
            PutRequest(
                key=key(chain, depth),
                parent=key(chain, depth - 1) if depth else None,
                length=size,
                tenant=tenant,
                pin=pin if depth == DEPTH - 1 else Pin.NONE,
                hints=hints,
            )
            for depth in range(first, DEPTH)
        ]
        before = self.state.catalog.usage().tenant_bytes["limited"]
        expires = not at_once and self.count % 2 == 0
        ttl_s = TTL_S if expires else None
        reservation = self.state.reservations.reserve(name, wishes, ttl_s, self.now)
        assert self.state.catalog.usage().tenant_bytes["limited"] <= max(before, QUOTA_UNITS * ALIGNMENT)
        for wish, slot in zip(wishes, reservation.slots, strict=True):
            assert (slot.outcome is PutOutcome.PRESENT) <= (wish.key in self.truth)
        if not reservation.objects:
            return
        assert self.state.reservations.reserve(name, wishes, ttl_s, self.now) is reservation
        if expires:
            self.expiring[name] = self.now + TTL_S
        self.writing[name] = {}
        for stored in reservation.objects.values():
            assert stored.offset is not None
            content = self.writing[name][stored.key] = self.new_number()
            self.memory.write(stored.offset, stored.length, content)
        if at_once:
            self.finish(name, [])

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.writing)))
        if self.is_over(name):
            with pytest.raises(StaleLease):
                self.state.reservations.commit(name, self.writing[name], self.now)
            return
        self.finish(name, [b for b in self.writing[name] if data.draw(st.integers(0, 3)) == 0])

    def is_over(self, name: str) -> bool:
        return self.expiring.get(name, math.inf) <= self.now

    def finish(self, name: str, corrupt: Sequence[BlockKey]) -> None:
        contents = self.writing.pop(name)
        assert self.state.reservations.commit(name, contents, self.now) is None
        for item in self.state.reservations.objects_to_verify(name)[1]:
            assert self.memory.read(item.offset, item.length) == item.checksum
        self.state.reservations.verified(name, corrupt, self.now)
        assert self.state.reservations.commit(name, {}, self.now) == tuple(corrupt)
        for block in contents.keys() - set(corrupt):
            found = self.state.catalog.find(block)
            assert found is not None
            self.truth[block] = (found.generation, contents[block])
            self.law.pins[block] = found.pin

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.writing)))
        self.closing[name] = self.writing.pop(name)
        assert self.state.reservations.abort(name, self.now) is not None
        assert self.state.reservations.abort(name, self.now) is None

    @precondition(lambda self: self.closing)
    @rule()
    def window_is_closed(self) -> None:
        name, _ = self.closing.popitem()
        self.state.reservations.window_closed(name, self.now)

    # Readers

    @rule(chain=chains, last=depths)
    def lease(self, chain: int, last: int) -> None:
        name = f"lease-{self.new_number()}"
        keys = blocks(chain)[: last + 1]
        present = self.state.catalog.present(keys)
        lease = self.state.leases.grant(name, keys, TTL_S, self.now)
        assert len(lease.objects) <= [*present, False].index(False)
        self.begin(lease.loads)
        assert self.state.leases.grant(name, keys, TTL_S, self.now).loads == () or not lease.objects
        if lease.objects:
            self.waiting[name] = lease
            self.settle_if_ready(name)

    def begin(self, loads: Sequence[DiskReadMove]) -> None:
        self.loads += loads
        for load in loads:
            assert load.object.place is not None
            self.memory.write(load.offset, load.object.length, NOTHING)

    def settle_if_ready(self, name: str) -> None:
        lease = self.waiting[name]
        if any(self.state.tier_moves.is_loading(stored) for stored in lease.objects):
            return
        del self.waiting[name]
        try:
            settled = self.state.leases.settle(name)
        except StaleLease:  # the repeated `lease` call settled it to nothing
            return
        if settled.objects:
            self.leases[name] = (lease.expires_at, settled.objects)

    @precondition(lambda self: self.leases or self.waiting)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted([*self.leases, *self.waiting])))
        self.leases.pop(name, None)
        self.waiting.pop(name, None)
        self.protect()
        self.state.leases.release(name, self.now)
        self.state.leases.release(name, self.now)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        self.state.leases.renew(name, TTL_S, self.now)
        self.leases[name] = (self.now + TTL_S, self.leases[name][1])

    @rule(seconds=st.sampled_from([TTL_S / 2, TTL_S]), timer_fires=st.booleans())
    def time_passes(self, seconds: float, timer_fires: bool) -> None:
        self.now += seconds
        for name in [n for n, (expires_at, _) in self.leases.items() if expires_at <= self.now]:
            with pytest.raises(StaleLease):
                self.state.leases.renew(name, TTL_S, self.now)
        self.leases = {n: lease for n, lease in self.leases.items() if lease[0] > self.now}
        self.waiting = {n: one for n, one in self.waiting.items() if one.expires_at > self.now}
        self.protect()
        if timer_fires:
            self.expire()

    def expire(self) -> None:
        given_up = {reservation.reservation_id for reservation in self.state.expire(self.now)}
        assert given_up == {name for name in self.writing if self.is_over(name)}
        for name in given_up:
            self.closing[name] = self.writing.pop(name)
        next_deadline = self.state.next_deadline()
        assert next_deadline is None or next_deadline > self.now

    @rule(chain=chains)
    def prefetch(self, chain: int) -> None:
        self.begin(self.state.leases.prefetch(blocks(chain)))

    @rule(chain=chains)
    def touch(self, chain: int) -> None:
        self.state.record_uses(pack_keys(blocks(chain)))

    # Moves

    @precondition(lambda self: not self.disk_is_lost)
    @rule(limit=st.sampled_from([1, 2 * ALIGNMENT, 2**30]), at_once=st.booleans())
    def demote(self, limit: int, *, at_once: bool) -> None:
        begun = self.state.tier_moves.demotions(limit)
        self.stores += begun
        for store in begun if at_once else ():
            self.written(store, good=True)

    @precondition(lambda self: not self.disk_is_lost)
    @rule(chain=chains)
    def copy(self, chain: int) -> None:
        found = map(self.state.catalog.find, blocks(chain))
        self.stores += filter(None, map(self.state.tier_moves.copy, filter(None, found)))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), good=often)
    def write_ends(self, data: st.DataObject, good: bool) -> None:
        self.written(data.draw(st.sampled_from(self.stores)), good=good)

    def written(self, store: DiskWriteMove, *, good: bool) -> None:
        self.stores.remove(store)
        written = store.object.header()
        assert store.object.offset is not None
        content = self.memory.read(store.object.offset, written.length)
        assert content == written.checksum, "it changed while it was being written"
        place = self.disk.write(written) if good and not self.disk_is_lost else None
        if written.generation <= self.removed_up_to.get(written.key, 0):
            self.disk.forget([written])  # the tier does this if `forget` came before the write ended
        self.state.tier_moves.write_ended(store, place)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), good=often)
    def read_ends(self, data: st.DataObject, good: bool) -> None:
        load = data.draw(st.sampled_from(self.loads))
        self.loads.remove(load)
        read = good and not self.disk_is_lost
        if read:
            self.memory.write(load.offset, load.object.length, load.object.checksum)
        wanted = self.truth.get(load.object.key, (0, 0))[0] == load.object.generation
        if wanted and not read:
            del self.truth[load.object.key]
        with self.no_eviction():
            self.state.tier_moves.read_ended(load, read)
        for name in list(self.waiting):
            self.settle_if_ready(name)

    @precondition(lambda self: self.disk.live and not self.disk_is_lost)
    @rule(data=st.data())
    def relocate(self, data: st.DataObject) -> None:
        unknown = {place for _, place in self.unknown}
        old = data.draw(st.sampled_from(sorted(self.disk.live)))
        if old in unknown or old not in self.disk.kept:
            return
        moved, new = self.disk.kept[old], self.disk.move(old)
        wanted = self.state.tier_moves.relocated(moved, old, new)
        assert wanted == (self.truth.get(moved.key, (0, 0))[0] == moved.generation)
        self.disk.moved(old, new, wanted=wanted)

    @rule(chain=chains, depth=depths)
    def check(self, chain: int, depth: int) -> None:
        """Ends a running check, or starts one."""
        stored = self.state.catalog.find(key(chain, depth))
        if self.checks:
            self.state.tier_moves.release_after_check(self.checks.pop())
        elif stored is not None:
            self.state.tier_moves.hold_for_check(stored)
            self.checks.append(stored)

    # Others

    @rule(chain=chains, depth=depths, corrupt=st.booleans())
    def remove(self, chain: int, depth: int, corrupt: bool) -> None:
        self.removed(key(chain, depth), corrupt=corrupt)

    @precondition(lambda self: self.loads or self.stores)
    @rule(data=st.data())
    def remove_what_moves(self, data: st.DataObject) -> None:
        moving = [*self.loads, *self.stores]
        self.removed(data.draw(st.sampled_from(moving)).object.key, corrupt=False)

    def removed(self, block: BlockKey, *, corrupt: bool) -> None:
        with self.no_eviction():
            removed = self.state.remove([block], corrupt=corrupt)
        assert [o.key for o in removed] == [block] * (block in self.truth)
        self.truth.pop(block, None)
        for o in removed:
            self.removed_up_to[block] = o.generation
        self.disk.forget(removed)
        self.protect()

    @rule(chain=chains, depth=depths, pin=pins)
    def pin(self, chain: int, depth: int, pin: Pin) -> None:
        block = key(chain, depth)
        assert self.state.pin([block], pin) == (block in self.truth)
        if block in self.truth:
            self.law.pins[block] = pin

    @rule(kind=st.sampled_from(["compact", "compact", "compact", "lose the disk", "restart"]))
    def something_rare(self, kind: str) -> None:
        if kind == "compact":
            self.disk.compact()
        elif kind == "restart":  # a crash: writes in flight are lost
            # A node counts its starts, so objects found later have no generation of this life.
            self.next_generation = self.state.catalog.latest_generation + 1
            self.start()
        elif not self.disk_is_lost:
            with self.no_eviction():
                self.state.forget_disk()
            self.disk_is_lost = True
            self.truth = {k: known for k, known in self.truth.items() if k in self.law.tiers}

    @precondition(lambda self: self.unknown)
    @rule(data=st.data())
    def find_on_disk(self, data: st.DataObject) -> None:
        found, place = self.unknown.pop(data.draw(st.integers(0, len(self.unknown) - 1)))
        if found.generation <= self.removed_up_to.get(found.key, 0):
            self.disk.forget([found])
            self.disk.release(place)  # the mover does this for objects removed before they were found
            return
        known = self.truth.get(found.key)
        is_latest = known is None or known[0] < found.generation
        with self.no_eviction() if known is not None and is_latest else nullcontext():  # it replaces an older one
            kept = self.state.restore(found, place)
        if kept:
            assert is_latest
            self.truth[found.key] = (found.generation, found.checksum)
            self.law.pins[found.key] = found.pin
            self.protect()
        else:
            is_being_written = any(found.key in each for each in (*self.writing.values(), *self.closing.values()))
            assert known is not None or is_being_written or not self.fits(found)
            self.disk.release(place)

    def fits(self, found: DiskObject) -> bool:
        usage = self.state.catalog.usage()
        arriving = sum(store.disk_bytes for store in self.stores)
        room = usage.disk_limit_bytes - usage.disk_live_bytes - arriving
        return not self.disk_is_lost and self.disk.space(found.length) <= room


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_two_tiers_keep_every_guarantee_under_every_policy(name: str) -> None:
    machine = type("TwoTiersUnderPolicy", (TwoTiers,), {"policy_name": name})
    num_examples = examples(80 if name == DEFAULT_POLICY else 10)
    limits = settings(max_examples=num_examples, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(machine, settings=limits)
