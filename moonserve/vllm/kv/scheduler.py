"""The connector in vLLM's scheduler: finds prompts in the store, and plans what the workers load, store and hand off.

Blocks that workers read after a step are pinned until every worker has reported them, so that vLLM does not reuse them.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from moonserve.kvstore.client import KvStore, connect
from moonserve.protocol.errors import InvalidRequest, MoonserveError
from moonserve.protocol.kv_blocks import BlockKey, root_key
from moonserve.protocol.process.logs import OutageLog
from moonserve.protocol.request import NO_HINTS, CacheHints
from moonserve.vllm.kv.cache_groups import CacheGroup, alignment, longest_prefix
from moonserve.vllm.kv.chained_keys import ChainedKeys, Extras, StoredKeys
from moonserve.vllm.kv.lease_renewals import HandoffChannels, LeaseRenewals
from moonserve.vllm.kv.settings import ConnectorSettings
from moonserve.vllm.kv.step_plan import (
    Counts,
    GroupBlocks,
    Load,
    Offer,
    Remote,
    Save,
    StepPlan,
    StepReport,
    StoredBlocks,
)

log = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""How long a lookup may keep the scheduler. A longer one goes on beside the steps, and its request waits for it."""
_LOOKUP_S = 1.0
_LOADING_PAUSE_S = 0.0005
_PINNED_PAUSE_S = 0.002
"""Pauses of steps without work: vLLM steps all the time while a load or the end of a pin is awaited, and would take the
transfers' processor. Only loads delay a request."""
NULL_BLOCK = 0
"""vLLM's block that stands for those out of a window."""
_COMPLETED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request of vLLM's scheduler."""

    request: Any
    extras: Extras | None
    chains: dict[int, ChainedKeys]
    """Keys by block size."""
    hints: CacheHints
    stored: list[bytearray]
    """Per group and block: 1 = in the store, or on its way there."""
    lookup: Future[list[bytearray]] | None = None
    num_computed: int = 0
    """Tokens that were computed when the lookup was asked for."""
    is_offered: bool = False

    def keys(self, group: CacheGroup) -> list[BlockKey]:
        """Returns the keys of all full blocks of the known tokens."""
        chain = self.chains[group.block_size]
        if len(chain.keys) < self.request.num_tokens // group.block_size:
            chain.extend(self.request.all_token_ids[:], self.extras)
        return chain.keys


class ConnectorScheduler:
    """The scheduler's half. vLLM's scheduler calls its methods, one at a time; `close` it."""

    def __init__(
        self,
        settings: ConnectorSettings,
        groups: list[CacheGroup],
        namespace: str,
        num_ranks: int,
        extras_of: Callable[[Any], Extras | None],
        *,
        saves: bool,
        loads: bool,
        publishes: bool = False,
    ) -> None:
        """`extras_of` returns what a request's keys depend on beside its tokens; `publishes`: `take_stored` is called.
        Raises as `kvstore.client.connect`."""
        self._groups = groups
        self._root = root_key(namespace)
        self._num_ranks = num_ranks
        self._max_pinned = settings.max_pinned
        self._stored_keys = [[StoredKeys(namespace, g, r) for r in range(num_ranks)] for g in range(len(groups))]
        self._extras_of = extras_of
        self._saves, self._loads = saves, loads
        self._publishes = publishes
        self._saving: dict[int, list[StoredBlocks]] = {}
        """Blocks that are in the store once every rank has saved them, by pin."""
        self._stored: list[StoredBlocks] = []
        self._store: KvStore | None = None
        if settings.join:
            options = settings.transfer_options()
            self._store = connect(settings.join, cluster_token=settings.cluster_token, options=options)
        self._channels = HandoffChannels(settings.cluster_token)
        self._threads = ThreadPoolExecutor(settings.io_threads, "moonserve lookups")
        self._renewals = LeaseRenewals(self._channels, settings.lease_s / 3)
        self._tracked: dict[str, _Tracked] = {}
        self._plan = StepPlan()
        self._manager: Any = None
        self._pins = Pins(num_ranks)
        self._loading: set[str] = set()
        self._outages = OutageLog(log, "request %s: the store cannot be asked: %s")
        self.addresses: list[str] = []
        """Where decode servers reach this server's workers, by rank."""
        self._counts: Counts = Counter()

    def bind(self, cache_manager: Any) -> None:
        """Takes vLLM's KV cache manager."""
        self._manager = cache_manager

    def close(self) -> None:
        self._renewals.close()
        self._threads.shutdown(cancel_futures=True)
        self._channels.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    # Requests

    def add(self, request: Any) -> None:
        self._tracked[request.request_id] = _Tracked(
            request,
            self._extras_of(request),
            {group.block_size: ChainedKeys(self._root, group.block_size) for group in self._groups},
            _hints_of(request),
            [bytearray() for _ in self._groups],
        )
        if (remote := self._remote_to_load(request)) is not None:
            self._renewals.add(remote)

    def matched_tokens(self, request: Any, num_computed: int) -> int | None:
        """Returns how many tokens beyond the computed ones can be loaded; None = not known yet. May be asked again."""
        tracked = self._tracked[request.request_id]
        tracked.num_computed = num_computed
        if self._remote_to_load(request) is not None:
            # The last token is computed here, since its logits are needed.
            return max(0, int(request.num_prompt_tokens) - 1 - num_computed)
        if self._store is None or not self._loads or request.num_tokens < alignment(self._groups):
            return 0
        if tracked.lookup is None:
            tracked.lookup = self._threads.submit(self._look_up, self._store, tracked, request.num_tokens)
        try:
            tracked.stored = tracked.lookup.result(_PATIENCE_S)
        except concurrent.futures.TimeoutError:
            return None
        # vLLM computes the last token of a full hit again, whose neighbours may be out of the window that was loaded.
        limit = request.num_tokens - any(group.window is not None for group in self._groups)
        return longest_prefix(self._groups, tracked.stored, num_computed, limit) - num_computed

    def allocated(self, request: Any, num_external: int) -> None:
        """Plans the load of tokens behind the computed ones into the blocks that the request has got for them."""
        tracked = self._tracked[request.request_id]
        remote = self._remote_to_load(request)
        if remote is not None:
            request.kv_transfer_params["do_remote_prefill"] = False  # also after a preemption
            if num_external == 0:  # the prompt is cached here
                self._release(remote)
        if num_external == 0:
            return
        first, last = tracked.num_computed, tracked.num_computed + num_external
        groups = self._blocks_between(request.request_id, first, last)
        keys = [[] if remote is not None else tracked.keys(group) for group in self._groups]
        self._plan.loads.append(Load(request.request_id, groups, keys, remote))
        self._loading.add(request.request_id)
        tracked.lookup = None

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request. Returns the parameters with which a decode server finds its KV, if it is to."""
        tracked = self._tracked.pop(request.request_id)
        if (remote := Remote.of(request)) is not None:
            self._renewals.remove(remote)
        if (unused := self._remote_to_load(request)) is not None:
            self._release(unused)
        if not tracked.hints.store:
            new = self._blocks_between(request.request_id, tracked.num_computed, request.num_tokens)
            self._manager.evict_blocks({block_id for blocks in new for block_id in blocks.block_ids})
        if not tracked.is_offered:
            return None
        if request.status.name not in _COMPLETED:
            self._plan.withdrawn.append(request.request_id)
            return None
        return self._handoff_parameters(request)

    def _handoff_parameters(self, request: Any) -> dict[str, Any]:
        host, _, port = self.addresses[0].rpartition("/")[2].rpartition(":")
        return {
            **request.kv_transfer_params,  # such as hints
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.addresses[0],
            "remote_request_id": request.request_id,
            "remote_block_ids": [[NULL_BLOCK]],  # routers test whether there are any
            "remote_host": host,
            "remote_port": int(port),
            "remote_addresses": self.addresses,
            "tp_size": self._num_ranks,
        }

    def _remote_to_load(self, request: Any) -> Remote | None:
        """Returns where the prompt's KV is to be fetched; None if it is not, or was already."""
        parameters = request.kv_transfer_params or {}
        if not (self._loads and parameters.get("do_remote_prefill")):
            return None
        remote = Remote.of(request)
        if remote is None or len(remote.addresses) != self._num_ranks:
            log.error("request %s: its kv_transfer_params are not of a like server; it is computed", request.request_id)
            parameters["do_remote_prefill"] = False
            return None
        return remote

    def _release(self, remote: Remote) -> None:
        self._threads.submit(self._channels.release, remote.request_id, remote.addresses)

    def _look_up(self, store: KvStore, tracked: _Tracked, num_tokens: int) -> list[bytearray]:
        """Tells which blocks of each group are in the store, at every rank. Nothing, if the store does not answer."""
        try:
            found = []
            for group, ranks in zip(self._groups, self._stored_keys, strict=True):
                keys = tracked.keys(group)[: num_tokens // group.block_size]
                places = range(len(keys))
                there = [store.batch_exists(of_rank.blocks(keys, places), timeout_s=_LOOKUP_S) for of_rank in ranks]
                found.append(bytearray(map(all, zip(*there, strict=True))))
        except MoonserveError as error:
            self._outages.failed(tracked.request.request_id, error)
            return [bytearray() for _ in self._groups]
        return found

    # Steps

    def plan_step(self, scheduled: Any) -> StepPlan:
        """Returns what the workers do beside this step. `scheduled` is vLLM's SchedulerOutput."""
        if not scheduled.total_num_scheduled_tokens:
            time.sleep(_LOADING_PAUSE_S if self._loading else _PINNED_PAUSE_S)
        for request_id, num_computed in _computed_before(scheduled):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            after = num_computed + scheduled.num_scheduled_tokens[request_id]
            # Later tokens are drafts, or not known to the scheduler yet.
            after = min(after, tracked.request.num_tokens)
            if self._saves and self._store is not None and tracked.hints.store:
                self._plan_save(tracked, after)
            parameters = tracked.request.kv_transfer_params or {}
            wanted = parameters.get("do_remote_decode") and not tracked.is_offered
            if self._saves and wanted and after >= tracked.request.num_prompt_tokens:
                self._plan_offer(tracked)
        plan, self._plan = self._plan, StepPlan()
        return plan

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._loading.discard(request_id)
            tracked = self._tracked.get(request_id)
            if tracked is not None and (remote := Remote.of(tracked.request)) is not None:
                self._renewals.remove(remote)  # the worker has released it

    def reported(self, report: StepReport) -> None:
        for pin_id in report.failed_saves:
            self._saving.pop(pin_id, None)
        for pin_id, num_workers in report.unpinned.items():
            if self._pins.unpin(pin_id, num_workers, self._manager.block_pool):
                self._stored += self._saving.pop(pin_id, [])
        for request_id in report.failed_loads:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.stored = [bytearray() for _ in self._groups]

    def take_counts(self) -> Counts:
        """Returns the events since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def take_stored(self) -> list[StoredBlocks]:
        """Returns the blocks that are in the store since the last call. Those of requests whose keys depend on more
        than tokens are left out."""
        stored, self._stored = self._stored, []
        return stored

    def is_waiting(self) -> bool:
        """True if workers will report something that only a further step brings here."""
        return bool(self._pins)

    def _plan_save(self, tracked: _Tracked, num_tokens: int) -> None:
        tables = None
        groups: list[GroupBlocks] = []
        for index, group in enumerate(self._groups):
            stored, end = tracked.stored[index], num_tokens // group.block_size
            stored.extend(bytes(max(0, end - len(stored))))
            places = [place for place in range(end) if not stored[place]] if 0 in stored[:end] else []
            if places:
                tables = tables or self._manager.get_block_ids(tracked.request.request_id)
                for place in places:
                    stored[place] = 1
                places = [place for place in places if tables[index][place] != NULL_BLOCK]
            groups.append(GroupBlocks(places, [tables[index][place] for place in places] if tables else []))
        count = sum(len(blocks.places) for blocks in groups)
        if not count:
            return
        pool = self._manager.block_pool
        if self._pins.num_blocks + count > self._max_pinned * pool.num_gpu_blocks:
            self._counts["skipped_saves/backlog"] += count
            return
        pin_id = self._pins.pin(groups, pool)
        keys = [tracked.keys(group) for group in self._groups]
        hints = rest = tracked.hints.without_return()
        if num_tokens // alignment(self._groups) >= tracked.request.num_prompt_tokens // alignment(self._groups):
            hints, tracked.hints = tracked.hints, rest  # the return comes once: the store visits the whole chain for it
        self._plan.saves.append(Save(pin_id, tracked.request.request_id, groups, keys, hints))
        if self._publishes and tracked.extras is None:
            self._saving[pin_id] = [
                self._stored_blocks(tracked, group, run) for group, blocks in enumerate(groups) for run in blocks.runs()
            ]

    def _stored_blocks(self, tracked: _Tracked, group: int, places: list[int]) -> StoredBlocks:
        size = self._groups[group].block_size
        stored = self._stored_keys[group][0].blocks(tracked.keys(self._groups[group]), places)
        return StoredBlocks(
            group=group,
            keys=[block.key for block in stored],
            parent=stored[0].parent,
            token_ids=list(tracked.request.all_token_ids[places[0] * size : (places[-1] + 1) * size]),
            block_size=size,
        )

    def _plan_offer(self, tracked: _Tracked) -> None:
        request = tracked.request
        groups = self._blocks_between(request.request_id, 0, request.num_prompt_tokens)
        pin_id = self._pins.pin(groups, self._manager.block_pool)
        self._plan.offers.append(Offer(pin_id, request.request_id, groups, request.num_prompt_tokens))
        tracked.is_offered = True

    def _blocks_between(self, request_id: str, first: int, last: int) -> list[GroupBlocks]:
        """Returns the blocks that hold tokens [first, last), without those out of a window."""
        groups = []
        for group, table in zip(self._groups, self._manager.get_block_ids(request_id), strict=True):
            end = min(len(table), -(-last // group.block_size))
            places = [place for place in range(first // group.block_size, end) if table[place] != NULL_BLOCK]
            groups.append(GroupBlocks(places, [table[place] for place in places]))
        return groups


class Pins:
    """Blocks that vLLM must not reuse until every worker has reported them."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pinned: dict[int, tuple[list[Any], int]] = {}
        self._next_id = 0
        self.num_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._pinned)

    def pin(self, groups: list[GroupBlocks], pool: Any) -> int:
        blocks = [pool.blocks[block_id] for each in groups for block_id in each.block_ids]
        pool.touch(blocks)
        self._next_id += 1
        self._pinned[self._next_id] = blocks, self._num_workers
        self.num_blocks += len(blocks)
        return self._next_id

    def unpin(self, pin_id: int, num_workers: int, pool: Any) -> bool:
        """Returns True if no worker needs the blocks any more."""
        blocks, left = self._pinned.pop(pin_id)
        if left > num_workers:
            self._pinned[pin_id] = blocks, left - num_workers
            return False
        self.num_blocks -= len(blocks)
        pool.free_blocks(reversed(blocks))  # the end of a prompt is evicted first
        return True


def _computed_before(scheduled: Any) -> Iterator[tuple[str, int]]:
    """Yields each scheduled request and the number of its tokens that earlier steps have computed."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduled.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _hints_of(request: Any) -> CacheHints:
    try:
        return CacheHints(**(request.kv_transfer_params or {}).get("cache_hints", {}))
    except (TypeError, InvalidRequest) as error:
        log.warning("request %s: its cache_hints are ignored: %s", request.request_id, error)
        return NO_HINTS
