"""From the tables to what a policy is told of each prefill instance, and from its answer to the record. Pure."""

from __future__ import annotations

import numpy as np

from conductor.columns import PrefillTable, StoreTable
from conductor.cost.accuracy import Times
from conductor.cost.transfer import LOCAL_BYTES_PER_S
from conductor.decision import PrefillColumns
from conductor.eligible import Able
from conductor.policies.base import Offers, Weighed
from conductor.prefix import PrefixMap
from protocol.layout import KvLayout


def offers_for(
    able: Able[PrefillTable],
    prefixes: PrefixMap,
    stores: StoreTable,
    layout: KvLayout,
    now: float,
) -> Offers:
    prefills, instances = able.table, able.instances
    device_blocks, prefix_blocks = prefixes.own_blocks(prefills)
    local_s = layout.block_bytes / LOCAL_BYTES_PER_S
    sender = prefixes.best_store
    if sender is None:
        remote_s = np.zeros(len(prefills))
    else:
        rates = np.minimum(stores.bytes_per_s[sender], prefills.bytes_per_s)
        is_near = prefills.host == stores.host[sender]
        remote_s = np.where(is_near, local_s, layout.block_bytes / rates)
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
        lambda row, rank: instances[row].queue.look(now, rank),
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
