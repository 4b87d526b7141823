"""Responses that later ones may continue, in memory: each tenant's own, together at most so many bytes. Pure.

Over the bound the tenant that takes most loses what it used longest ago, so that one tenant's flood costs no other
tenant its conversations while that has less. A gateway's own: another one, or the same after a restart, has none.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """What a later turn and a look back need."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]  # of the conversation so far, with this response's output

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return len(json.dumps(self.response)) + len(json.dumps(self.messages))


class ResponseStore:
    """By tenant and id."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._num_bytes: dict[str, int] = {}  # by tenant
        self._kept: dict[str, OrderedDict[str, tuple[StoredResponse, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Makes room by forgetting; what is larger than the bound is not kept."""
        size = stored.num_bytes
        if size > self._max_bytes:
            return
        self.remove(tenant, response_id)
        self._kept.setdefault(tenant, OrderedDict())[response_id] = (stored, size)
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + size
        while self.num_bytes > self._max_bytes:
            self._forget_one()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None for what is not kept (any more), or somebody else's."""
        kept = self._kept.get(tenant)
        if kept is None or response_id not in kept:
            return None
        kept.move_to_end(response_id)
        return kept[response_id][0]

    def remove(self, tenant: str, response_id: str) -> bool:
        """Whether it was there."""
        kept = self._kept.get(tenant)
        found = kept.pop(response_id, None) if kept is not None else None
        if found is None:
            return False
        self._took(tenant, found[1])
        return True

    def _forget_one(self) -> None:
        tenant = max(self._num_bytes, key=lambda name: self._num_bytes[name])
        _, (_, size) = self._kept[tenant].popitem(last=False)
        self._took(tenant, size)

    def _took(self, tenant: str, size: int) -> None:
        self._num_bytes[tenant] -= size
        if not self._kept[tenant]:
            del self._kept[tenant], self._num_bytes[tenant]

    def validate(self) -> None:
        """Raises AssertionError when the bound or the books are broken."""
        assert self.num_bytes <= self._max_bytes, "more is kept than may be"
        for tenant, kept in self._kept.items():
            assert kept, f"{tenant} has a place and nothing in it"
            assert self._num_bytes[tenant] == sum(size for _, size in kept.values())
        assert self._kept.keys() == self._num_bytes.keys()
