"""Which prefixes store nodes copy from each other, and which copies go again. Pure: `now` is an argument.

Rule: a leading run of blocks gains a replica where its absence cost placements more seconds lately (`wanted`)
than `margin` times what copying it takes, beside all that is on its way. Then it rests for a window, so that no demand
is answered twice. Bounds: copies into a store take at most `busy_share` of its time, and replicas that were made here
at most `store_share` of its memory. Only what was made here goes again for being cold, children first, never the last
replica and never a block that another one on its store follows.

This comes beside the replicas that forwarding makes (Algorithm 1: an instance that fetches a prefix keeps it, and puts
it into its home store). Those need a request that fetches; this also sees what was waited for because nobody fetched:
queues at the holders, and prefixes just too short of the threshold. What has been fetched once is there, and costs
nobody anything any more, so that nothing is made twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile

import numpy as np

from conductor.columns import Floats
from conductor.decision import Decision
from conductor.events import CopyDue, CopySettled, CopyStep, DropDue
from conductor.members import Instance, Members
from conductor.replication.demand import Demand, demand_of
from conductor.replication.wanted import DemandWindow, Wanted, is_known
from kvstore.directory import Directory
from kvstore.directory.chains import Chains
from kvstore.replication.ledger import UNDER_WAY_S, Ledger
from protocol.errors import ConfigError
from protocol.ids import InstanceId, Role
from protocol.keys import BlockKey, pack_keys

KEYS_PER_STEP = 64
"""One call to a node, as in `kvstore.replication.planner`."""
CHAINS_PER_PLAN = 32
"""Of one moment; others are as wanted a second later."""
COPY_S = 0.02
"""Of a copy, whatever its size: a lease, a reservation and a commit between busy processes."""
LOOK_EVERY_S = 0.01
"""A demand takes about as long as a third of a placement; of so many a second every one counts."""
LOOK_BURST_S = 1.0
"""As many as come in so long may come at once: requests do, after a pause of whoever sends them."""
BURST_S = 10.0
"""A store that was left alone may be kept busy for its share of so many seconds at once."""
LEAVES_S = 30.0
"""A node that was told to drop a replica has done it and said so by then, or has not and never will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationTerms:
    """When. Raises ConfigError for what cannot be."""

    # Mooncake: 8 hits in 10 s. Three times as long, since a demand is a whole placement and not the read of one block.
    least_hits: int = 8
    window_s: float = 30.0
    margin: float = 2.0  # predictions of transfers are off by as much
    cool_s: float = 60.0  # Mooncake's rest
    busy_share: float = 0.1
    store_share: float = 0.1

    def __post_init__(self) -> None:
        if self.least_hits < 1 or min(self.window_s, self.margin, self.cool_s) <= 0:
            raise ConfigError("--replica-cool-s, and hits, window and margin, must be above 0")
        if not (0 < self.busy_share <= 1 and 0 <= self.store_share <= 1):
            raise ConfigError(f"--replica-share is {self.store_share}; it is 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """A leading run that one store lacks."""

    target: Instance
    keys: tuple[BlockKey, ...]
    saved_s: float
    cost_s: float

    @property
    def gain_s(self) -> float:
        return self.saved_s - self.cost_s


class Replication:
    """Decisions over the members and the index of one conductor."""

    def __init__(self, members: Members, directory: Directory, terms: ReplicationTerms) -> None:
        self._members = members
        self._directory = directory
        self._chains = Chains(directory)
        self._terms = terms
        self._window = DemandWindow(terms.window_s)
        self._fresh: list[Demand] = []  # since the last plan
        self._num_unseen = 0  # placements since the last that was looked at
        self._looks_from = -math.inf
        self._ledger = Ledger()
        self._num_asked = 0  # copies
        self._under_way: dict[int, float] = {}  # copies, until when they are expected
        self._busy_until: dict[InstanceId, float] = {}  # with copies, at its share
        self._leaving: dict[tuple[InstanceId, BlockKey], float] = {}  # being dropped, until when

    # ---- what is learned

    def observe(self, decision: Decision, keys: Sequence[BlockKey], now: float) -> None:
        """A placement was decided, whatever becomes of it; `keys`: of its prompt. Of very many, some are looked at."""
        layout = self._members.layout
        if layout is None or not decision.best_blocks or len(self._members.stores) < 2:
            return
        self._num_unseen += 1
        if now < self._looks_from:
            return
        weight, self._num_unseen = self._num_unseen, 0
        self._looks_from = max(self._looks_from, now - LOOK_BURST_S) + LOOK_EVERY_S
        demand = demand_of(decision, keys, self._members, self._directory, layout, weight)
        if demand is None:
            return
        self._window.add(demand, now)
        if self.num_replicas:
            self._fresh.append(demand)

    def settled(self, event: CopySettled, now: float) -> None:
        """What became of a copy; one that failed is not tried again with this store for a while."""
        if self._under_way.pop(event.copy_id, -math.inf) <= now:
            return  # so late that it was given up: another one may have been asked for since
        if event.succeeded:
            self._ledger.arrived(event.keys, event.target, now)
            return
        self._ledger.failed(event.keys, event.target, now)
        for key in event.keys:
            self._ledger.forget_made(key, event.target)

    def forget(self, store: InstanceId) -> None:
        """It has left, or begins anew: what it holds then is its own."""
        for key in list(self._ledger.made_on(store)):
            self._ledger.forget_made(key, store)
        self._busy_until.pop(store, None)

    @property
    def num_replicas(self) -> int:
        """Blocks that stores hold, or are about to, because of it."""
        return self._ledger.num_made

    def noted(self, decision: Decision, keys: Sequence[BlockKey]) -> Decision:
        """With how many of the blocks to be read their stores have because of it."""
        if not self.num_replicas:
            return decision
        made = self._ledger.made_on
        found = sum(
            key in made(InstanceId(store))
            for store, first, number in decision.sources
            for key in keys[first : first + number]
        )
        return replace(decision, replica_blocks=found) if found else decision

    # ---- what follows

    def plan(self, now: float) -> list[CopyDue | DropDue]:
        """Asked regularly. What becomes of copies is to be told by `settled`."""
        self._ledger.expire(now)
        # What has gone may come back.
        self._leaving = {
            (store, key): until
            for (store, key), until in self._leaving.items()
            if until > now and store in self._directory.holders(key)
        }
        self._under_way = {each: until for each, until in self._under_way.items() if until > now}
        self._note_uses(now)
        drops: list[CopyDue | DropDue] = list(self._drops(now))
        return [*drops, *self._copies(now)]

    def _copies(self, now: float) -> Iterator[CopyDue]:
        members = self._members
        wanted = self._window.wanted(
            self._directory.table, members.stores.ids, self._terms.least_hits, now
        )
        if wanted is None or members.layout is None:
            return
        found = [
            proposal
            for row, store in enumerate(members.with_role(Role.STORE))
            if self._takes(store, now)
            for proposal in self._proposals(store, wanted, wanted.saved_s[row], now)
        ]
        for proposal in sorted(found, key=lambda p: (-p.gain_s, p.target.instance_id)):
            if (copy := self._accept(proposal, now)) is not None:
                yield copy

    def _takes(self, store: Instance, now: float) -> bool:
        is_free = not store.draining and not self._ledger.is_shunned(store.instance_id, now)
        return is_free and self._num_allowed(store) > 0

    def _proposals(
        self, store: Instance, wanted: Wanted, saved_s: Floats, now: float
    ) -> Iterator[_Proposal]:
        """What `store` should have of chains that were wanted, each up to where it is worth it."""
        lacking = (saved_s > 0) & ~self._directory.held_by(store.instance_id, wanted.slots)
        rows = np.flatnonzero(lacking)
        table = self._directory.table
        worth = {table.key(int(wanted.slots[row])): float(saved_s[row]) for row in rows}
        inner = {self._chains.parent(key) for key in worth}
        leaves = [key for key in worth if key not in inner]
        for leaf in sorted(leaves, key=lambda key: (-worth[key], key))[:CHAINS_PER_PLAN]:
            run = self._lacked(store, leaf, now)
            proposal = self._worthwhile(store, [(key, worth.get(key, 0.0)) for key in run], now)
            if proposal is not None:
                yield proposal

    def _lacked(self, store: Instance, leaf: BlockKey, now: float) -> list[BlockKey]:
        """The first run of blocks towards `leaf` that a store neither has nor expects. What comes behind others that
        are on their way can follow when they are there: were they not to arrive, nobody would find it."""

        def lacks(key: BlockKey) -> bool:
            return self._lacks(store, key, now)

        return list(takewhile(lacks, dropwhile(lambda key: not lacks(key), self._chains.to(leaf))))

    def _lacks(self, store: Instance, key: BlockKey, now: float) -> bool:
        name = store.instance_id
        return name not in self._directory.holders(key) and name not in self._ledger.expected(
            key, now
        )

    def _worthwhile(
        self, store: Instance, run: Sequence[tuple[BlockKey, float]], now: float
    ) -> _Proposal | None:
        """The leading part of a run that is worth more than it costs and that the bounds allow."""
        run = run[: self._num_allowed(store)]
        if not run:
            return None
        block_s = self._copy_s(store, [key for key, _ in run], now) / len(run)
        margin, time_left_s = self._terms.margin, self._time_left_s(store, now)
        num_affordable = math.floor((time_left_s - COPY_S) / block_s) if block_s else len(run)
        part = []
        for key, saved_s in run[: max(num_affordable, 0)]:
            if saved_s <= margin * block_s or self._ledger.is_resting(key, now):
                break
            part.append((key, saved_s))
        saved_s, cost_s = sum(saved for _, saved in part), COPY_S + block_s * len(part)
        if not part or saved_s <= margin * cost_s:
            return None
        keys = tuple(key for key, _ in part)
        return _Proposal(target=store, keys=keys, saved_s=saved_s, cost_s=cost_s)

    def _accept(self, proposal: _Proposal, now: float) -> CopyDue | None:
        """None where a better one of the same plan took its place."""
        target, name = proposal.target, proposal.target.instance_id
        if any(self._ledger.is_resting(key, now) for key in proposal.keys):
            return None
        if len(proposal.keys) > self._num_allowed(target):
            return None
        if proposal.cost_s > self._time_left_s(target, now):
            return None
        steps = tuple(self._steps(proposal.keys, target))
        keys = tuple(key for step in steps for key in step.keys)
        if not keys:
            return None
        self._ledger.expect(keys, name, now)
        self._ledger.rest(keys, now + self._terms.window_s)
        self._ledger.note_made(keys, name, now)
        self._busy_until[name] = (
            self._busy_since(name, now) + proposal.cost_s / self._terms.busy_share
        )
        self._num_asked += 1
        self._under_way[self._num_asked] = now + UNDER_WAY_S
        return CopyDue(
            copy_id=self._num_asked,
            target=target.endpoint,
            steps=steps,
            saved_s=proposal.saved_s,
            cost_s=proposal.cost_s,
        )

    # ---- bounds

    def _num_allowed(self, store: Instance) -> int:
        """Blocks that may yet be made there; none in a store that has not said how large it is."""
        layout = self._members.layout
        assert layout is not None, "without workers nothing is placed"
        most = self._terms.store_share * store.load.capacity_bytes / layout.block_bytes
        return max(math.floor(most) - len(self._ledger.made_on(store.instance_id)), 0)

    def _busy_since(self, store: InstanceId, now: float) -> float:
        return max(self._busy_until.get(store, -math.inf), now - BURST_S)

    def _time_left_s(self, store: Instance, now: float) -> float:
        """For copying now."""
        return (now - self._busy_since(store.instance_id, now)) * self._terms.busy_share

    def _copy_s(self, target: Instance, keys: Sequence[BlockKey], now: float) -> float:
        """Of the bytes, from who has most of these blocks."""
        layout, source = self._members.layout, self._longest(keys, target)
        if source is None or layout is None:
            return math.inf
        nbytes = np.array([float(len(keys) * layout.block_bytes)])
        links = np.array([target.link])
        return float(self._members.transfers.seconds(source[0].link, links, nbytes, now)[0])

    # ---- where from

    def _steps(self, keys: Sequence[BlockKey], target: Instance) -> Iterator[CopyStep]:
        """As much of `keys`, from the first on, as open stores have."""
        done = 0
        while done < len(keys):
            source = self._longest(keys[done : done + KEYS_PER_STEP], target)
            if source is None:
                return
            store, length = source
            yield CopyStep(source=store.endpoint, keys=tuple(keys[done : done + length]))
            done += length

    def _longest(self, keys: Sequence[BlockKey], target: Instance) -> tuple[Instance, int] | None:
        """The store with the longest run of leading `keys`; of equal ones that with the fewest reads to come."""
        found = []
        for name, run in self._directory.match(pack_keys(keys)).items():
            store = self._members.find(name)
            if store is None or store.role is not Role.STORE or store is target or store.draining:
                continue
            found.append((store, run.length))
        return min(found, key=lambda each: (-each[1], each[0].reads.num_blocks), default=None)

    # ---- fewer

    def _note_uses(self, now: float) -> None:
        fresh, self._fresh = self._fresh, []
        table = self._directory.table
        for store, made in self._ledger.made():
            passed = [d.slots for d in fresh if store in d.readers and is_known(d, table)]
            if passed:
                used = np.isin(table.find_all(pack_keys(list(made))), np.concatenate(passed))
                keys = [key for key, is_used in zip(made, used, strict=True) if is_used]
                self._ledger.note_made(keys, store, now)

    def _drops(self, now: float) -> Iterator[DropDue]:
        for name, made in self._ledger.made():
            store = self._members.find(name)
            cold = [key for key, at in made.items() if now - at >= self._terms.cool_s]
            if store is None or not cold:
                continue
            holders = {key: self._stores_with(key, name) for key in cold}
            spare = [key for key in cold if name in holders[key] and len(holders[key]) > 1]
            free = self._chains.unfollowed(spare, name, holders)
            for key in cold:
                self._ledger.forget_made(key, name)  # it is gone, or goes, or stays as the last one
            # What stays because something follows on it is looked at again when that may have gone.
            self._ledger.note_made(set(spare).difference(free), name, now)
            if free:
                self._leaving |= dict.fromkeys(((name, key) for key in free), now + LEAVES_S)
                yield DropDue(store=store.endpoint, keys=tuple(free))

    def _stores_with(self, key: BlockKey, asked: InstanceId) -> set[InstanceId]:
        """Those whose replica stays, as far as known, and `asked` itself."""
        found = (self._members.find(name) for name in self._directory.holders(key))
        return {
            s.instance_id
            for s in found
            if s is not None
            and s.role is Role.STORE
            and (s.instance_id == asked or not s.draining)
            and (s.instance_id, key) not in self._leaving
        }

    def validate(self) -> None:
        """Raises AssertionError where the books contradict themselves."""
        self._window.validate()
        for store, made in self._ledger.made():
            member = self._members.find(store)
            assert member is not None, "replicas on a store that has left"
            assert member.role is Role.STORE
            assert made, "a store without replicas is not listed"
