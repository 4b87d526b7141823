"""One-sided reads and writes between registered memory of the cluster's processes.

Owns segments, windows, batches, rails and the transports `shm`, `tcp` and `rdma`. Knows nothing of blocks, keys,
requests or models.
"""

from transfer.base import Op, RemoteSegment, ScatterTransfer, Transfer
from transfer.batch import Batch
from transfer.config import FaultPlan, TransferOptions
from transfer.engine import TransferEngine
from transfer.segments import Segment, SegmentInfo

__all__ = [
    "Batch",
    "FaultPlan",
    "Op",
    "RemoteSegment",
    "ScatterTransfer",
    "Segment",
    "SegmentInfo",
    "Transfer",
    "TransferEngine",
    "TransferOptions",
]
