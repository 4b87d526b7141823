"""From the tables to what a policy is told of each prefill instance, and from its answer to the record. Pure."""

from __future__ import annotations

import numpy as np

from conductor.columns import PrefillTable
from conductor.cost.accuracy import Times
from conductor.decision import PrefillColumns
from conductor.eligible import Able
from conductor.members import Members
from conductor.policies.base import Looks, Offers, Weighed
from conductor.prefix import PrefixMap
from conductor.transfers import seconds_per_block
from protocol.layout import KvLayout


def offers_for(
    able: Able[PrefillTable],
    prefixes: PrefixMap,
    members: Members,
    layout: KvLayout,
    now: float,
) -> Offers:
    prefills, instances = able.table, able.instances
    device_blocks, prefix_blocks = prefixes.own_blocks(prefills)
    local_s = layout.block_bytes / prefills.local_bytes_per_s
    remote_s = np.zeros(len(prefills))
    if prefixes.best_store is not None:
        missing = prefixes.best_blocks - prefix_blocks
        if np.count_nonzero(missing > 0):
            source = int(members.stores.link[prefixes.best_store])
            remote_s = seconds_per_block(
                members.transfers, source, prefills.link, missing, layout.block_bytes, now
            )
    return Offers(
        prefills.identity,
        prefills.chosen_at.copy(),  # the record outlives the table
        device_blocks,
        prefix_blocks,
        prefills.estimate_s(now),
        local_s,
        remote_s,
        prefills.c0,
        prefills.c1,
        prefills.c2,
        now,
        lambda row, rank: instances[row].queue.wait_s(now, rank),
        Looks(instances, now),
    )


def record(prefills: PrefillTable, offers: Offers, weighed: Weighed) -> PrefillColumns:
    return PrefillColumns(
        prefills.ids,
        offers.device_blocks,
        offers.prefix_blocks,
        weighed.reuse_blocks,
        weighed.load_s,
        weighed.transfer_s,
        offers.queue_s if weighed.queue_s is None else weighed.queue_s,
        weighed.prefill_s,
        weighed.ttft_s,
        np.zeros(len(weighed.ttft_s)) if weighed.added_s is None else weighed.added_s,
        offers.chosen_at,
    )


def predicted_times(prefills: PrefillColumns, row: int, ttft_s: float) -> Times:
    return Times(
        ttft_s=ttft_s,
        queue_s=float(prefills.queue_s[row]),
        transfer_s=float(prefills.load_s[row] + prefills.transfer_s[row]),
        prefill_s=float(prefills.prefill_s[row]),
    )
