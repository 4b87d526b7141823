"""Cluster membership: registration, epochs, heartbeat timeouts, compatibility of workers. Pure.

Rules: there is one instance per id, with its newest epoch. All workers share one fingerprint and layout, set by the
first worker and forgotten with the last. An instance that is silent for longer than the lease is removed. Every
instance has a row in its role's table (`conductor.prediction.instance_table`), in order of registration.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moonserve.conductor.events import Load, Register, StepTotals, TrafficTotals
from moonserve.conductor.prediction.compute_time import DecodeCost, PrefillCost
from moonserve.conductor.prediction.decode_forecast import DecodeForecast
from moonserve.conductor.prediction.decode_load import DecodeLoad
from moonserve.conductor.prediction.heartbeat_deltas import HeartbeatDeltas
from moonserve.conductor.prediction.instance_table import DecodeTable, PrefillTable, RowRef, StoreTable, Table, digest64
from moonserve.conductor.prediction.queue_time import PrefillQueue
from moonserve.conductor.prediction.transfer_time import LOCAL_BYTES_PER_S, Transfers
from moonserve.protocol.errors import Incompatible, InvalidRequest, StaleLease
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.request import Endpoint, InstanceId, Role
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile

# Prompt tokens per prefill step of an instance that does not report it; usual on GPUs. If its steps are smaller, the
# predicted wait for the running step is too long, by at most the rest of the running prompt.
_STEP_TOKENS = 8_192


@dataclass(slots=True, eq=False)
class Instance:
    """A live member of the cluster."""

    registration: Register
    heard_at: float
    row_ref: RowRef[Any]  # row in its role's table
    queue: PrefillQueue  # empty for a store; of a decode worker, the prompts that it prefills itself
    decode: DecodeLoad  # empty unless a decode worker
    prefill_cost: PrefillCost  # as registered, corrected by reports
    decode_cost: DecodeCost  # as registered, corrected by heartbeats
    observed: HeartbeatDeltas = field(default_factory=HeartbeatDeltas)
    load: Load = field(default_factory=Load)
    reported_at: float = -math.inf  # time of the last report that corrected a cost

    # Copied from the registration because they are read often.
    instance_id: InstanceId = field(init=False)
    endpoint: Endpoint = field(init=False)
    role: Role = field(init=False)

    def __post_init__(self) -> None:
        self.endpoint = self.registration.endpoint
        self.instance_id = InstanceId(self.endpoint.instance_id)
        self.role = self.registration.role

    @property
    def draining(self) -> bool:
        return not self.row_ref.table.is_open[self.row_ref.row]

    @property
    def link(self) -> int:
        """Number of this endpoint in `Members.transfers`."""
        return int(self.row_ref.table.link[self.row_ref.row])

    def drain(self, draining: bool) -> None:
        self.row_ref.table.is_open[self.row_ref.row] = not draining

    def choose(self, placement: int) -> None:
        """Records that the placement with this number goes to this instance."""
        self.row_ref.table.chosen_at[self.row_ref.row] = placement

    def observe_prefill(self, num_tokens: int, num_cached: int, seconds: float, now: float) -> None:
        """Corrects the prefill cost by one observed prompt and updates the instance's row. Ignored for a decode worker,
        because its time includes decode steps that ran next to the prompt."""
        if self.role is Role.DECODE:
            return
        self.reported_at = now
        self.prefill_cost.observe(num_tokens, num_cached, seconds)
        self._write_prefill_cost()

    def observe_decode(self, steps: StepTotals) -> None:
        """Corrects the decode cost by the mean of the observed steps and updates the instance's row."""
        number = steps.num_steps
        self.reported_at = self.heard_at
        self.decode_cost.observe(steps.sequences / number, steps.context_tokens / number, steps.seconds / number)
        self._write_decode_cost()

    def decay(self, share: float) -> None:
        """Keeps only this share, 0 to 1, of the learned cost correction
        (`conductor.prediction.learned_estimates.EstimateDecay`)."""
        if share == 1.0 or self.role is Role.STORE:
            return
        if self.role is Role.DECODE:
            self.decode_cost.correction.decay(share)
            self._write_decode_cost()
        else:
            self.prefill_cost.correction.decay(share)
            self._write_prefill_cost()

    def _write_prefill_cost(self) -> None:
        _fill_profile(self.row_ref.table, self.row_ref.row, self.prefill_cost.current)

    def _write_decode_cost(self) -> None:
        table, row = self.row_ref.table, self.row_ref.row
        _fill_profile(table, row, self.decode_cost.current)
        # A cause that slows decode steps slows prefill chunks on the same worker too.
        factor, prefill = self.decode_cost.correction.factor, self.registration.prefill_profile
        chunks = (factor * prefill.c0, factor * prefill.c1, factor * prefill.c2)
        table.p0[row], table.p1[row], table.p2[row] = chunks

    def write_prefill_queue(self) -> None:
        """Updates a decode worker's row after a change of the queue of prompts that it prefills itself."""
        if self.role is Role.DECODE:
            self.row_ref.table.reading_s[self.row_ref.row] = self.queue.placed_s

    def add_reads(self, num_blocks: int) -> None:
        """Adds to the number of blocks that placed prompts have yet to read from this store; may be negative."""
        self.row_ref.table.pending_reads[self.row_ref.row] += num_blocks

    def set_directory_bit(self, bit: int) -> None:
        """Sets the instance's number in the directory."""
        self.row_ref.table.bit[self.row_ref.row] = bit


class Members:
    """All live instances, by id, by role and as table rows."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._instances: dict[InstanceId, Instance] = {}
        self._by_role: dict[Role, tuple[Instance, ...]] = dict.fromkeys(Role, ())
        self._no_silence_before = math.inf  # no instance's lease ends before this
        self.max_model_len = 0  # the smallest of all workers; 0 = no worker
        self.prefills = PrefillTable()
        self.decodes = DecodeTable()
        self.stores = StoreTable()
        self.decode_forecast = DecodeForecast()  # future load of the decode instances
        self.transfers = Transfers()  # between stores and workers

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def __len__(self) -> int:
        return len(self._instances)

    def find(self, instance_id: str) -> Instance | None:
        return self._instances.get(InstanceId(instance_id))

    def with_role(self, role: Role) -> tuple[Instance, ...]:
        """Returns the instances of a role in order of registration."""
        return self._by_role[role]

    @property
    def layout(self) -> KvLayout | None:
        """KV layout shared by all workers; None while there is no worker."""
        worker = self._any_worker()
        return None if worker is None else worker.registration.layout

    @property
    def fingerprint(self) -> str | None:
        worker = self._any_worker()
        return None if worker is None else worker.registration.fingerprint

    def check(self, registration: Register) -> None:
        """Raises StaleLease, Incompatible or InvalidRequest if the instance may not join."""
        endpoint = registration.endpoint
        known = self.find(endpoint.instance_id)
        if known is not None and endpoint.epoch < known.endpoint.epoch:
            raise StaleLease(
                f"{endpoint.instance_id} epoch {endpoint.epoch} was replaced by epoch {known.endpoint.epoch}",
                instance_id=endpoint.instance_id,
            )
        if registration.role is not Role.STORE:
            self._check_worker(registration, known)

    def add(self, registration: Register, now: float) -> Instance:
        """Adds an instance that passed `check` and whose id is not in use."""
        table = self._table(registration.role)
        row_ref: RowRef[Any] = RowRef(table, table.append())
        instance = _instance(registration, now, row_ref, self.decode_forecast)
        _fill(table, row_ref.row, registration)
        table.link[row_ref.row] = self.transfers.add_endpoint(
            int(table.host[row_ref.row]), registration.bytes_per_s, registration.local_bytes_per_s
        )
        self._instances[instance.instance_id] = instance
        self._no_silence_before = min(self._no_silence_before, now + self._lease_s)
        self._reindex()
        return instance

    def remove(self, instance: Instance) -> None:
        table, row = instance.row_ref.table, instance.row_ref.row
        instance.decode.detach()
        self.transfers.remove_endpoint(int(table.link[row]))
        instance.row_ref.detach()
        table.delete(row)
        for later in self._by_role[instance.role][row + 1 :]:
            later.row_ref.row -= 1
        del self._instances[instance.instance_id]
        self._reindex()

    def observe_heartbeat(self, instance: Instance, load: Load) -> None:
        """Applies the memory, decode step and bandwidth figures of a heartbeat."""
        if load.num_blocks:
            row_ref, most = instance.row_ref, instance.registration.num_blocks
            row_ref.table.num_blocks[row_ref.row] = min(load.num_blocks, most)
        steps = instance.observed.new_steps(load.steps)
        if steps is not None and instance.role is Role.DECODE:
            instance.observe_decode(steps)
        for traffic in instance.observed.new_traffic(load.traffic):
            peer = self.find(traffic.peer)
            if peer is not None and Role.DECODE not in (peer.role, instance.role):
                self._observe_traffic(instance, peer, traffic)

    def _observe_traffic(self, instance: Instance, peer: Instance, traffic: TrafficTotals) -> None:
        here, there = instance.link, peer.link
        self.transfers.observe(there, here, traffic.read_bytes, traffic.read_s)
        self.transfers.observe(here, there, traffic.written_bytes, traffic.written_s)
        if peer.instance_id == instance.registration.home_store and traffic.read_s:
            table = self.prefills
            table.local_bytes_per_s[instance.row_ref.row] = self.transfers.uncontended_rate(there, here)

    def silent(self, now: float) -> list[Instance]:
        """Returns the instances whose lease has expired; cheap if there are none."""
        if now <= self._no_silence_before:
            return []
        gone = [i for i in self if now - i.heard_at > self._lease_s]
        alive = [i.heard_at for i in self if now - i.heard_at <= self._lease_s]
        self._no_silence_before = min(alive, default=math.inf) + self._lease_s
        return gone

    def extend_leases(self, seconds: float, now: float) -> None:
        """Extends all leases by `seconds`, during which the conductor could receive nothing."""
        for instance in self:
            instance.heard_at = min(instance.heard_at + seconds, now)
        self._no_silence_before = min((i.heard_at for i in self), default=math.inf) + self._lease_s

    def _check_worker(self, registration: Register, known: Instance | None) -> None:
        if registration.layout is None or not registration.fingerprint:
            raise InvalidRequest("a worker's registration needs its KV layout and fingerprint")
        if registration.num_blocks < 1 or registration.max_model_len < 2:
            raise InvalidRequest("a worker needs at least one block and two tokens of context")
        peer = next((i for i in self if i.role is not Role.STORE and i is not known), None)
        if peer is None:
            return
        ours = peer.registration
        if (ours.fingerprint, ours.layout) != (registration.fingerprint, registration.layout):
            raise Incompatible(
                f"{registration.endpoint.instance_id} has fingerprint {registration.fingerprint} "
                f"and {registration.layout}, the cluster ({peer.instance_id}) has fingerprint "
                f"{ours.fingerprint} and {ours.layout}",
                instance_id=registration.endpoint.instance_id,
                peer=peer.instance_id,
            )

    def _any_worker(self) -> Instance | None:
        return next((i for i in self if i.role is not Role.STORE), None)

    def _table(self, role: Role) -> Table:
        return {
            Role.PREFILL: self.prefills,
            Role.DECODE: self.decodes,
            Role.STORE: self.stores,
        }[role]

    def _reindex(self) -> None:
        self._by_role = {role: tuple(i for i in self if i.role is role) for role in Role}
        workers = self._by_role[Role.PREFILL] + self._by_role[Role.DECODE]
        self.max_model_len = min((w.registration.max_model_len for w in workers), default=0)
        self._find_homes()

    def _find_homes(self) -> None:
        rows = {store.instance_id: row for row, store in enumerate(self._by_role[Role.STORE])}
        names = [p.registration.home_store for p in self._by_role[Role.PREFILL]]
        homes = [None if name is None else rows.get(name) for name in names]
        self.prefills.has_home = np.array([home is not None for home in homes], np.bool_)
        self.prefills.home = np.array([home or 0 for home in homes], np.int64)

    def validate(self) -> None:
        assert sum(len(members) for members in self._by_role.values()) == len(self)
        kinds = {(i.registration.fingerprint, i.registration.layout) for i in self if i.role is not Role.STORE}
        assert len(kinds) <= 1, "workers of two models in one cluster"
        for key, instance in self._instances.items():
            assert key == instance.instance_id
            assert instance.heard_at + self._lease_s >= self._no_silence_before
            assert not len(instance.queue) or instance.role is not Role.STORE
            assert not len(instance.decode) or instance.role is Role.DECODE
            instance.queue.validate()
            instance.decode.validate()
            instance.prefill_cost.validate()
            instance.decode_cost.validate()
        self.decode_forecast.validate()
        self.transfers.validate()
        for role in Role:
            self._validate_rows(role)

    def _validate_rows(self, role: Role) -> None:
        table, members = self._table(role), self._by_role[role]
        table.validate()
        assert table.ids.tolist() == [i.instance_id for i in members]
        assert [i.row_ref.row for i in members] == list(range(len(members)))
        assert all(i.row_ref.table is table for i in members)
        if role is Role.DECODE:
            assert np.allclose(self.decodes.reading_s, [i.queue.placed_s for i in members])
        if role is Role.PREFILL:
            homes = zip(members, self.prefills.has_home, self.prefills.home, strict=True)
            for member, has_home, row in homes:
                home = member.registration.home_store
                assert has_home == (home is not None and home in self.stores.ids)
                assert not has_home or self.stores.ids[row] == home


def _instance(registration: Register, now: float, row_ref: RowRef[Any], outlook: DecodeForecast) -> Instance:
    role = registration.role
    prefill = row_ref if role is Role.PREFILL else RowRef.in_private_table(PrefillTable)
    decode = row_ref if role is Role.DECODE else RowRef.in_private_table(DecodeTable)
    return Instance(
        registration=registration,
        heard_at=now,
        row_ref=row_ref,
        queue=PrefillQueue(prefill, _half_step_s(registration)),
        decode=DecodeLoad(registration.num_blocks, decode, outlook),
        prefill_cost=PrefillCost(registration.prefill_profile),
        decode_cost=DecodeCost(registration.decode_profile),
    )


def _half_step_s(registration: Register) -> float:
    """Returns the mean wait for the current step of a running prompt that a new prompt overtakes."""
    step_tokens = registration.max_num_batched_tokens or _STEP_TOKENS
    return registration.prefill_profile.seconds(step_tokens // 2, 0)


def _fill(table: Table, row: int, registration: Register) -> None:
    """Fills the columns that stay constant as long as the instance is a member."""
    endpoint = registration.endpoint
    table.ids[row] = endpoint.instance_id
    table.is_open[row] = True
    table.host[row] = digest64(endpoint.host)
    table.num_blocks[row] = registration.num_blocks
    match table:
        case PrefillTable():
            _fill_profile(table, row, registration.prefill_profile)
            table.identity[row] = digest64(endpoint.instance_id)
            table.local_bytes_per_s[row] = registration.local_bytes_per_s or LOCAL_BYTES_PER_S
        case DecodeTable():
            _fill_profile(table, row, registration.decode_profile)
            table.slots[row] = registration.max_num_seqs or math.inf
            table.reads_prompts[row] = registration.reads_prompts
            table.step_tokens[row] = registration.max_num_batched_tokens or math.inf
            prefill = registration.prefill_profile
            table.p0[row], table.p1[row], table.p2[row] = prefill.c0, prefill.c1, prefill.c2


def _fill_profile(table: PrefillTable | DecodeTable, row: int, profile: PrefillProfile | DecodeProfile) -> None:
    table.c0[row], table.c1[row], table.c2[row] = profile.c0, profile.c1, profile.c2
