"""Identifier types that several processes share."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""Name of a long-lived process of the cluster, stable across restarts: `prefill-0`, `store-1`."""

RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
GatewayId = NewType("GatewayId", str)

BlockId = int
"""Index of a block in one pool."""


class Role(StrEnum):
    """Role of an instance in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


def new_id(prefix: str) -> str:
    """Returns a new random id, unique in the cluster, such as `req-9f86d081884c7d65`."""
    return f"{prefix}-{secrets.token_hex(8)}"
