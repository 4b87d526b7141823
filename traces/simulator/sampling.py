"""Periodic samples: the state of instances, and the number of replicas of popular blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from protocol.keys import KEY_BYTES, BlockKey
from traces.format import TraceRecord
from traces.simulator.machines import Node, PrefillNode
from traces.simulator.prefill import PrefillMachine
from traces.simulator.results import InstanceSample, ReplicaSample


def key_of(hash_id: int) -> BlockKey:
    """Returns the block key for a hash id of a trace. Both are equal where the prefix is."""
    return BlockKey((hash_id + 1).to_bytes(KEY_BYTES, "little"))


class Samples:
    """The samples of one run."""

    def __init__(self, records: Iterable[TraceRecord], num_ranks: int) -> None:
        """`records`: the whole trace. `num_ranks`: number of most popular blocks to follow."""
        hash_ids = (hash_id for record in records for hash_id in record.hash_ids)
        self._row_of = {hash_id: row for row, hash_id in enumerate(dict.fromkeys(hash_ids))}
        self._hash_ids = list(self._row_of)
        self._uses = np.zeros(len(self._row_of), np.int64)
        self._num_ranks = num_ranks
        self.instances: list[InstanceSample] = []
        self.replicas: list[ReplicaSample] = []

    def used(self, hash_ids: Sequence[int]) -> None:
        """Counts the arrival of a prompt with these blocks."""
        self._uses[[self._row_of[hash_id] for hash_id in hash_ids]] += 1

    def take(self, prefills: Sequence[PrefillNode], others: Sequence[Node], now: float) -> None:
        for node in (*prefills, *others):
            self.instances.append(sample_of(node, now))
        # Among equally popular blocks, the one used first comes first.
        order = np.argsort(-self._uses, kind="stable")[: self._num_ranks]
        keys = [key_of(self._hash_ids[row]) for row in order[self._uses[order] > 0]]
        counts = np.zeros(len(keys), np.int64)
        for node in prefills:
            counts += np.array(node.store.present(keys), np.int64)
        self.replicas.append(ReplicaSample(at_s=now, replicas=tuple(counts.tolist())))


def sample_of(node: Node, now: float) -> InstanceSample:
    machine = node.machine
    context = 0 if isinstance(machine, PrefillMachine) else machine.context_tokens(now)
    queue_s = machine.queue_s() if isinstance(machine, PrefillMachine) else 0.0
    return InstanceSample(
        at_s=now,
        instance_id=node.name,
        queued=machine.num_waiting,
        running=machine.num_running,
        context_tokens=context,
        predicted_queue_s=queue_s,
    )
