"""One-sided reads and writes between registered memory of the cluster's processes: engine.py, batch.py; over rails
chosen in paths/, by a transport in shm/, tcp/ or rdma/. Knows nothing of blocks, keys, requests or models."""

from moonserve.transfer.batch import Batch
from moonserve.transfer.config import FaultPlan, TransferOptions
from moonserve.transfer.engine import TransferEngine
from moonserve.transfer.memory.segments import Segment, SegmentInfo
from moonserve.transfer.transport_interface import Op, RemoteSegment, ScatterTransfer, Transfer

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
