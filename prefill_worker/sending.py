"""Submits writes of KV with deadlines that grow with what is on its way to the same peer.

A write waits behind those before it, so their bytes count towards its time too; otherwise a long prompt over
a slow link would fail although its bytes flow. Forgets a peer's earlier incarnation when it meets a later one.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from protocol.request import Endpoint
from transfer import Batch, ScatterTransfer, TransferEngine, scatter
from transfer.patience import Patience

# A cluster has fewer instances; those that have not been heard of for long are left to the transfer engine.
MAX_KNOWN = 4096


class Sender:
    """Thread-safe: layers are sent from the engine's thread."""

    def __init__(self, transfer: TransferEngine, patience: Patience) -> None:
        self._transfer = transfer
        self._patience = patience
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        """Bytes by transfer address."""
        self._known: OrderedDict[str, Endpoint] = OrderedDict()

    def submit(self, write: ScatterTransfer) -> Batch:
        """Does not block. Raises what the transfer engine raises."""
        address, nbytes = write.remote.address, scatter.total(write.rows)
        with self._lock:
            self._under_way[address] += nbytes
            deadline_s = self._patience.deadline_s(self._under_way[address])
        try:
            batch = self._transfer.submit([write], deadline_s=deadline_s)
        except BaseException:  # whatever it was, nothing is under way
            self._ended(address, nbytes)
            raise
        batch.add_done_callback(lambda _: self._ended(address, nbytes))
        return batch

    def met(self, peer: Endpoint) -> None:
        """A later incarnation means that the earlier one is dead: what is on its way there fails now."""
        with self._lock:
            known = self._known.get(peer.instance_id)
            if known is not None and known.epoch >= peer.epoch:
                return
            self._known[peer.instance_id] = peer
            self._known.move_to_end(peer.instance_id)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if known is not None and known.transfer_address != peer.transfer_address:
            self._transfer.forget(known.transfer_address)

    def _ended(self, address: str, nbytes: int) -> None:
        with self._lock:
            self._under_way[address] -= nbytes
            if not self._under_way[address]:
                del self._under_way[address]
