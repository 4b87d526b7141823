"""Messages between the connector's halves, one plan per step to the workers, one report per step back."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import NO_HINTS, CacheHints


@dataclass(slots=True)
class GroupBlocks:
    """Some blocks of one group's block table."""

    places: list[int]
    """Positions in the table."""
    block_ids: list[int]

    def runs(self) -> list[list[int]]:
        """Returns the positions, which ascend, divided where one is left out."""
        runs = itertools.groupby(enumerate(self.places), lambda each: each[1] - each[0])
        return [[place for _, place in run] for _, run in runs]


@dataclass(slots=True)
class Remote:
    """A prompt whose KV a prefill server holds for this request."""

    request_id: str
    """Name of the request at the prefill server."""
    addresses: list[str]
    """RPC addresses of its workers, by rank."""

    @classmethod
    def of(cls, request: Any) -> Remote | None:
        """Returns what a request's `kv_transfer_params` name, or None."""
        parameters = request.kv_transfer_params or {}
        name, addresses = parameters.get("remote_request_id"), parameters.get("remote_addresses")
        return cls(name, list(addresses)) if name and addresses else None


@dataclass(slots=True)
class Load:
    """Blocks to fill before a request can run: from the store, or from a prefill server."""

    request_id: str
    groups: list[GroupBlocks]
    keys: list[list[BlockKey]]
    """Keys of the sequence's blocks, per group; empty for a load from a prefill server."""
    remote: Remote | None = None


@dataclass(slots=True)
class Save:
    """Blocks to store once the step has computed them. They are pinned until every worker has reported `pin_id`."""

    pin_id: int
    request_id: str
    groups: list[GroupBlocks]
    keys: list[list[BlockKey]]
    hints: CacheHints = NO_HINTS


@dataclass(slots=True)
class Offer:
    """A prompt that the step completes, to be fetched by a decode server. Pinned as in `Save`."""

    pin_id: int
    request_id: str
    groups: list[GroupBlocks]
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What the workers have to do beside a step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    """Requests whose offers nobody will fetch."""


@dataclass(slots=True)
class StepReport:
    """What ended at the workers since the last report."""

    unpinned: Counter[int] = field(default_factory=Counter)
    """Number of workers that need a pin no more, by `pin_id`."""
    failed_loads: set[str] = field(default_factory=set)
    """Requests whose blocks were not all loaded."""
    failed_saves: set[int] = field(default_factory=set)
    """Pins whose blocks are not in the store."""

    def __add__(self, other: StepReport) -> StepReport:
        return StepReport(
            self.unpinned + other.unpinned,
            self.failed_loads | other.failed_loads,
            self.failed_saves | other.failed_saves,
        )


@dataclass(slots=True)
class StoredBlocks:
    """Consecutive blocks of one group that every rank has put into the store."""

    group: int
    keys: list[BlockKey]
    """The keys of the first rank's objects."""
    parent: BlockKey | None
    """The key of the block before them; None = they begin a sequence."""
    token_ids: list[int]
    block_size: int


Counts = Counter[str]
"""Events by metric and label (`moonserve.vllm.metrics`), for example "tokens/loaded"."""
