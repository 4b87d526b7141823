"""Names of things that more than one process talks about."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""One long-lived process of the cluster, stable across its restarts: `prefill-0`, `store-1`."""

RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
GatewayId = NewType("GatewayId", str)

BlockId = int
"""A block's place in one pool."""


class Role(StrEnum):
    """What an instance does in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


def new_id(prefix: str) -> str:
    """An id that no other process will make, such as `req-9f86d081884c7d65`."""
    return f"{prefix}-{secrets.token_hex(8)}"
