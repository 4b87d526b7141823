"""One-sided reads and writes between registered memory of the cluster's processes.

Owns segments, windows, batches and the transports `shm` and `tcp`. Knows nothing of blocks, keys,
requests or models.
"""

from transfer.base import Op, RemoteSegment, Transfer
from transfer.batch import Batch
from transfer.engine import TransferEngine
from transfer.faults import FaultPlan
from transfer.segments import Segment

__all__ = [
    "Batch",
    "FaultPlan",
    "Op",
    "RemoteSegment",
    "Segment",
    "Transfer",
    "TransferEngine",
]
