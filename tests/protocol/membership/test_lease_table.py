"""Tests of the membership: the registry's table under clocks that jump, and `MemberView`, the view of a process."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonserve.protocol.errors import StaleLease
from moonserve.protocol.membership.registry import Member, MembershipChanges, MemberView, Superseded
from moonserve.protocol.membership.registry.embedded import EmbeddedRegistry
from moonserve.protocol.membership.registry.lease_table import MAX_ENDED, LeaseTable, with_epoch
from tests.protocol.membership.conftest import ids, member
from tests.thoroughness import any_order

IDS = st.sampled_from(["a", "b", "c"])
OWNERS = st.sampled_from(["x", "y"])
TTLS = st.sampled_from([1.0, 10.0])


class TableMachine(RuleBasedStateMachine):
    """Compares the table with a dict of id to (member, end). The clock jumps both ways; the table's time only grows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(first_epoch=1_000)
        self.clock = 0.0
        self.latest = 0.0
        self.model: dict[str, tuple[Member, float]] = {}
        self.given: list[Member] = []
        self.seen: tuple[int, list[Member]] = (1_000, [])

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0, 3600.0, -1.0, -3600.0]))
    def the_clock_changes(self, seconds: float) -> None:
        self.clock += seconds
        self.latest = max(self.latest, self.clock)
        self.table.expire(self.clock)
        self.model = {id: entry for id, entry in self.model.items() if entry[1] > self.latest}

    @rule(id=IDS, owner=OWNERS, ttl_s=TTLS, known=st.integers(0, 5_000))
    def a_member_joins(self, id: str, owner: str, ttl_s: float, known: int) -> None:
        wanted = member(id, owner=owner, epoch=known)
        if id in self.model and self.model[id][0].owner != owner:
            with pytest.raises(StaleLease, match=f"{id} is held"):
                self.table.join(wanted, ttl_s, self.clock)
            return
        joined = self.table.join(wanted, ttl_s, self.clock)
        assert joined.endpoint.epoch > known
        own = [given.endpoint.epoch for given in self.given if given.instance_id == id]
        assert all(joined.endpoint.epoch > earlier for earlier in own)
        self.given.append(joined)
        self.model[id] = (joined, self.latest + ttl_s)

    @rule(data=st.data(), ttl_s=TTLS)
    def a_member_renews(self, data: st.DataObject, ttl_s: float) -> None:
        chosen = self.any_member(data)
        if chosen is None:
            return
        holder = self.model.get(chosen.instance_id)
        if holder is not None and holder[0] == chosen:
            self.table.renew(chosen.instance_id, chosen.endpoint.epoch, ttl_s, self.clock)
            self.model[chosen.instance_id] = (chosen, self.latest + ttl_s)
            return
        with pytest.raises(StaleLease) as caught:
            self.table.renew(chosen.instance_id, chosen.endpoint.epoch, ttl_s, self.clock)
        assert isinstance(caught.value, Superseded) == (holder is not None)

    @rule(data=st.data())
    def a_member_leaves(self, data: st.DataObject) -> None:
        chosen = self.any_member(data)
        if chosen is None:
            return
        self.table.leave(chosen.instance_id, chosen.endpoint.epoch, self.clock)
        if chosen in [held for held, _ in self.model.values()]:
            del self.model[chosen.instance_id]

    def any_member(self, data: st.DataObject) -> Member | None:
        """Draws a member that holds, or once held, a lease."""
        return data.draw(st.sampled_from(self.given)) if self.given else None

    @invariant()
    def the_table_equals_the_model(self) -> None:
        self.table.validate()
        expected = [self.model[id][0] for id in sorted(self.model)]
        assert self.table.members(self.clock) == expected
        assert self.table.next_expiry_at == min((e for _, e in self.model.values()), default=None)

    @invariant()
    def the_version_changes_with_the_members(self) -> None:
        shown = (self.table.version, self.table.members(self.clock))
        assert (shown[0] != self.seen[0]) or shown[1] == self.seen[1]
        self.seen = shown


TestTable = any_order(TableMachine, 50)


def test_ended_ids_use_bounded_memory_and_get_later_epochs() -> None:
    """Ids that are gone get later epochs. A very high epoch that one id claims does not raise those of others."""
    table, epochs = LeaseTable(first_epoch=1), {}
    for number in range(2 * MAX_ENDED):
        name = f"w{number}"
        claimed = 2**61 if number == 5 else 0
        epochs[name] = table.join(member(name, epoch=claimed), 1.0, 0.0).endpoint.epoch
        table.leave(name, epochs[name], 0.0)
        table.validate()
    assert all(epoch < 2**40 for name, epoch in epochs.items() if name != "w5")
    for name, epoch in epochs.items():
        assert table.join(member(name), 1.0, 0.0).endpoint.epoch > epoch


@pytest.mark.parametrize("ttl_s", range(2, 14))
async def test_lease_that_expires_during_a_read_changes_the_version(ttl_s: int) -> None:
    """The end of a lease during a read changes the version. Otherwise watchers of the version would miss the end."""
    looks = itertools.count()  # one second apart
    registry = EmbeddedRegistry(clock=lambda: float(next(looks)))
    await registry.join(member(), ttl_s=ttl_s)
    shown: dict[int, list[Member]] = {}
    for _ in range(ttl_s):
        version, members = registry.current()
        assert shown.setdefault(version, members) == members
    assert members == []
    await registry.close()


A, B, C = member("a"), member("b"), member("c")


def test_update_returns_the_changes() -> None:
    known = MemberView(linger_s=0)
    assert known.update([B, A], now=0) == MembershipChanges(joined=(A, B))
    later = with_epoch(A, 7)
    assert known.update([later], now=1) == MembershipChanges(left=(B,), changed=(later,))
    assert known.update([later], now=2) == MembershipChanges()
    assert dict(known.members) == {"a": later}
    fuller = dataclasses.replace(later, facts={"free": "1"})
    assert known.update([fuller], now=3).changed == (fuller,)


def test_members_that_rejoin_in_time_are_not_removed() -> None:
    known = MemberView(linger_s=6)
    known.update([A, B, C], now=0)
    assert known.update([], now=10) == MembershipChanges()
    assert set(known.members) == {"a", "b", "c"}
    again = with_epoch(A, 9)
    assert known.update([again, C], now=12) == MembershipChanges(changed=(again,))
    assert known.due_at == 16
    assert known.expire(now=15.9) == MembershipChanges()
    assert known.expire(now=16) == MembershipChanges(left=(B,))
    assert known.due_at is None


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.floats(0, 5)), max_size=30), st.sampled_from([0.0, 6.0]))
def test_changes_add_up_to_the_members(answers: list[tuple[set[str], float]], linger_s: float) -> None:
    known, view, now = MemberView(linger_s=linger_s), dict[str, Member](), 0.0
    for names, seconds in answers:
        now += seconds
        joined, left, changed = known.update([member(name) for name in names], now)
        assert not changed
        assert not set(ids(list(joined))) & view.keys()
        view |= {new.instance_id: new for new in joined}
        for gone in left:
            del view[gone.instance_id]
        known.validate()
        assert view == dict(known.members)
        assert names <= view.keys()
