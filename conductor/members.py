"""Who belongs to the cluster: registration, epochs, silence, compatibility. Pure.

Rules: one instance per id, its newest epoch; all workers share one fingerprint and layout, set by the first of them
and forgotten with the last; what is silent for longer than the lease is gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from conductor.events import Load, Register
from conductor.ledger import DecodeBook, PrefillQueue
from protocol.errors import Incompatible, InvalidRequest, StaleLease
from protocol.ids import InstanceId, Role
from protocol.layout import KvLayout
from protocol.request import Endpoint


@dataclass(slots=True, eq=False)
class Instance:
    """A live member."""

    registration: Register
    heard_at: float
    decode: DecodeBook  # empty unless a decode worker
    queue: PrefillQueue = field(default_factory=PrefillQueue)  # empty unless a prefill worker
    load: Load = field(default_factory=Load)
    draining: bool = False
    chosen_at: int = 0  # number of the placement that last chose it; 0 = none yet
    pending_reads: int = 0  # store: blocks that placed prompts have yet to read from it

    # Of the registration; fields of their own because every placement reads them of every instance.
    instance_id: InstanceId = field(init=False)
    endpoint: Endpoint = field(init=False)
    role: Role = field(init=False)

    def __post_init__(self) -> None:
        self.endpoint = self.registration.endpoint
        self.instance_id = InstanceId(self.endpoint.instance_id)
        self.role = self.registration.role


class Members:
    """The live instances."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._instances: dict[InstanceId, Instance] = {}
        self._by_role: dict[Role, tuple[Instance, ...]] = dict.fromkeys(Role, ())
        self._no_silence_before = math.inf  # no instance's lease ends before this
        self.max_model_len = 0  # of the least capable worker; 0 = no worker

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def __len__(self) -> int:
        return len(self._instances)

    def find(self, instance_id: str) -> Instance | None:
        return self._instances.get(InstanceId(instance_id))

    def incarnation(self, instance_id: str, epoch: int) -> Instance | None:
        """The member with exactly this epoch."""
        instance = self.find(instance_id)
        return instance if instance is not None and instance.endpoint.epoch == epoch else None

    def with_role(self, role: Role) -> tuple[Instance, ...]:
        """In order of registration."""
        return self._by_role[role]

    @property
    def layout(self) -> KvLayout | None:
        """Of all workers; None while there is none."""
        worker = self._any_worker()
        return None if worker is None else worker.registration.layout

    @property
    def fingerprint(self) -> str | None:
        worker = self._any_worker()
        return None if worker is None else worker.registration.fingerprint

    def check(self, registration: Register) -> None:
        """Raises StaleLease, Incompatible or InvalidRequest when the instance may not join."""
        endpoint = registration.endpoint
        known = self.find(endpoint.instance_id)
        if known is not None and endpoint.epoch < known.endpoint.epoch:
            raise StaleLease(
                f"{endpoint.instance_id} epoch {endpoint.epoch} was replaced by epoch "
                f"{known.endpoint.epoch}",
                instance_id=endpoint.instance_id,
            )
        if registration.role is not Role.STORE:
            self._check_worker(registration, known)

    def add(self, registration: Register, now: float) -> Instance:
        """Adds a checked instance whose id is free."""
        instance = Instance(
            registration=registration, heard_at=now, decode=DecodeBook(registration.num_blocks)
        )
        self._instances[instance.instance_id] = instance
        self._no_silence_before = min(self._no_silence_before, now + self._lease_s)
        self._reindex()
        return instance

    def remove(self, instance: Instance) -> None:
        del self._instances[instance.instance_id]
        self._reindex()

    def silent(self, now: float) -> list[Instance]:
        """Those whose lease has run out; cheap when none has."""
        if now <= self._no_silence_before:
            return []
        gone = [i for i in self if now - i.heard_at > self._lease_s]
        alive = [i.heard_at for i in self if now - i.heard_at <= self._lease_s]
        self._no_silence_before = min(alive, default=math.inf) + self._lease_s
        return gone

    def _check_worker(self, registration: Register, known: Instance | None) -> None:
        if registration.layout is None or not registration.fingerprint:
            raise InvalidRequest("a worker registers with its KV layout and fingerprint")
        if registration.num_blocks < 1 or registration.max_model_len < 2:
            raise InvalidRequest("a worker has at least one block and two tokens of context")
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

    def _reindex(self) -> None:
        self._by_role = {role: tuple(i for i in self if i.role is role) for role in Role}
        workers = self._by_role[Role.PREFILL] + self._by_role[Role.DECODE]
        self.max_model_len = min((w.registration.max_model_len for w in workers), default=0)

    def validate(self) -> None:
        assert sum(len(members) for members in self._by_role.values()) == len(self)
        kinds = {
            (i.registration.fingerprint, i.registration.layout)
            for i in self
            if i.role is not Role.STORE
        }
        assert len(kinds) <= 1, "workers of two models in one cluster"
        for key, instance in self._instances.items():
            assert key == instance.instance_id
            assert instance.pending_reads >= 0
            assert instance.heard_at + self._lease_s >= self._no_silence_before
            assert not len(instance.queue) or instance.role is Role.PREFILL
            assert not len(instance.decode) or instance.role is Role.DECODE
            instance.queue.validate()
            instance.decode.validate()
