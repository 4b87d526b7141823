"""The connector in a vLLM worker: moves blocks between vLLM's KV memory, the store and prefill servers.

Loads and saves run in threads, beside the steps. Bytes that do not match their writer's checksum are never counted as
loaded. Whatever goes wrong with a load, vLLM computes the blocks again; whatever goes wrong with a save, the blocks are
not stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from moonserve.kvstore.client import KvStore, connect
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, Overloaded, PeerLost, StaleLease
from moonserve.protocol.pb import handoff_pb2
from moonserve.protocol.process.logs import OutageLog
from moonserve.transfer import Batch, Op, RemoteSegment, ScatterTransfer, TransferEngine
from moonserve.vllm.kv.cache_groups import CacheGroup
from moonserve.vllm.kv.chained_keys import StoredKeys
from moonserve.vllm.kv.handoff_server import HandoffServer
from moonserve.vllm.kv.kv_memory import KvMemory, kv_memory
from moonserve.vllm.kv.lease_renewals import HandoffChannels
from moonserve.vllm.kv.settings import ConnectorSettings
from moonserve.vllm.kv.step_plan import Counts, Load, Remote, Save, StepPlan, StepReport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_PORTION_BYTES = 8 << 20
_REST_S = 1.0
"""After a failed save, nothing is saved for this long."""


class ConnectorWorker:
    """One worker's half. Methods are called by vLLM's thread; `close` it."""

    def __init__(
        self, settings: ConnectorSettings, groups: list[CacheGroup], namespace: str, rank: int, *, hands_off: bool
    ) -> None:
        """`hands_off`: other servers may fetch prompts from here. Raises ConfigError, PeerLost (no store)."""
        self._settings = settings
        self._groups = groups
        self._namespace = namespace
        self._rank = rank
        self._keys = [StoredKeys(namespace, group, rank) for group in range(len(groups))]
        self._engine = TransferEngine(
            cluster_token=settings.cluster_token, options=settings.transfer_options(), name=f"vllm-{rank}"
        )
        self._engine.start()
        self._store: KvStore | None = None
        if settings.join:
            self._store = connect(settings.join, cluster_token=settings.cluster_token, engine=self._engine)
        self._channels = HandoffChannels(settings.cluster_token)
        self._server: HandoffServer | None = None
        if hands_off:
            self._server = HandoffServer(self._engine, groups, namespace, settings.cluster_token, settings.lease_s)
        self.address = "" if self._server is None else self._server.start()
        self._threads = ThreadPoolExecutor(settings.io_threads, "moonserve connector")
        self._memory: KvMemory
        self._saves_again_at = 0.0
        self._load_outages = OutageLog(log, "request %s: its KV cannot be loaded and is computed: %s")
        self._save_outages = OutageLog(log, "request %s: its KV is not stored: %s")
        # A group with a window holds only the end of a prompt.
        self._counted = next((group for group in groups if group.window is None), groups[0])
        self._lock = threading.Lock()
        self._counts: Counts = Counter()
        self._loaded: deque[tuple[Load, set[int]]] = deque()
        self._ended_pins: deque[int] = deque()
        self._failed_saves: deque[int] = deque()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def register(self, memory: torch.Tensor, lent_by: Callable[..., KvMemory] = kv_memory) -> None:
        """Takes vLLM's KV memory: one tensor of bytes in which all pages lie."""
        self._memory = lent_by(self._engine, memory)

    def close(self) -> None:
        """Ends all transfers. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self._channels.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._store is not None:
            self._store.close()
            self._store = None
        self._engine.close()

    # Steps

    def start_loads(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self._threads.submit(self._load, load)

    def step_computed(self, plan: StepPlan) -> None:
        """Starts the saves and offers of a step whose KV is computed."""
        self._memory.step_computed()
        for save in plan.saves:
            self._threads.submit(self._save, save)
        if self._server is not None:
            for offer in plan.offers:
                self._server.offer(offer, self._memory)
            if plan.withdrawn:
                self._server.withdraw(plan.withdrawn)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads ended, and those of them that failed as a whole."""
        ended, failed = set(), set()
        for _ in range(len(self._loaded)):
            load, bad = self._loaded.popleft()
            ended.add(load.request_id)
            if not bad:
                continue
            self._failed.add(load.request_id)
            if len(self._groups) == 1:
                self._invalid |= bad
            else:  # block ids of several groups do not tell which request is meant
                failed.add(load.request_id)
        return ended, failed

    def take_invalid_blocks(self) -> set[int]:
        """Returns the ids of blocks that vLLM must compute, of models with one group."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        pins = [self._ended_pins.popleft() for _ in range(len(self._ended_pins))]
        if self._server is not None:
            pins += self._server.take_ended()
        failed, self._failed = self._failed, set()
        unsaved = {self._failed_saves.popleft() for _ in range(len(self._failed_saves))}
        return StepReport(Counter(pins), failed, unsaved) if pins or failed or unsaved else None

    def take_counts(self) -> Counts:
        """Returns the events since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        if self._server is not None:
            counts["expired_handoffs/lease"] += self._server.take_num_expired()
        return +counts

    def _count(self, event: str, amount: int) -> None:
        with self._lock:
            self._counts[event] += amount

    # Loads, in threads

    def _load(self, load: Load) -> None:
        everything = {block_id for blocks in load.groups for block_id in blocks.block_ids}
        begin = time.monotonic()
        try:
            bad = self._load_stored(load) if load.remote is None else self._fetch(load, load.remote)
        except MoonserveError as error:
            self._load_outages.failed(load.request_id, error)
            self._count(f"failed_blocks/{_reason(error)}", len(everything))
            bad = everything
        except Exception:  # the request waits for an outcome, whatever went wrong
            log.exception("request %s: its KV cannot be loaded and is computed", load.request_id)
            self._count("failed_blocks/internal", len(everything))
            bad = everything
        if not bad:
            elapsed_ms = (time.monotonic() - begin) * 1000
            log.debug("request %s: %d blocks loaded in %.1f ms", load.request_id, len(everything), elapsed_ms)
        self._loaded.append((load, bad))

    def _load_stored(self, load: Load) -> set[int]:
        assert self._store is not None
        bad: set[int] = set()
        for group, of_group, blocks, keys in zip(self._groups, self._keys, load.groups, load.keys, strict=True):
            if not blocks.places:
                continue
            wanted = of_group.blocks(keys, blocks.places)
            with self._memory.writing(group, blocks.block_ids) as slots:
                found = self._store.batch_get_scattered(wanted, slots, timeout_s=self._settings.timeout_s)
            bad |= {block_id for block_id, there in zip(blocks.block_ids, found, strict=True) if not there}
            self._count_loaded("loaded", group, sum(found))
        if bad:
            log.warning("request %s: %d blocks are not in the store any more", load.request_id, len(bad))
            self._count("failed_blocks/missing", len(bad))
        return bad

    def _fetch(self, load: Load, remote: Remote) -> set[int]:
        """Fetches blocks from the prefill server's worker of the same rank."""
        address = remote.addresses[self._rank]
        request = handoff_pb2.LocateHandoffRequest(request_id=remote.request_id, namespace=self._namespace)
        try:
            there = self._channels.to(address).Locate(request, timeout=self._settings.timeout_s)
            return self._read(load, there)
        finally:
            self._channels.release(remote.request_id, [address])

    def _read(self, load: Load, there: handoff_pb2.HandoffLocation) -> set[int]:
        """READs the blocks of all groups, and returns the ids of those that are missing or damaged. Blocks are verified
        while later ones are on their way."""
        bad: set[int] = set()
        with contextlib.ExitStack() as stack:
            reads: list[tuple[CacheGroup, list[int], BufferSlots, list[int], Batch]] = []
            for group, blocks, far in zip(self._groups, load.groups, there.groups, strict=True):
                row_of = {place: row for row, place in enumerate(far.places)}
                bad |= {b for p, b in zip(blocks.places, blocks.block_ids, strict=True) if p not in row_of}
                block_ids = [b for p, b in zip(blocks.places, blocks.block_ids, strict=True) if p in row_of]
                if not block_ids:
                    continue
                rows = [row_of[place] for place in blocks.places if place in row_of]
                slots = stack.enter_context(self._memory.writing(group, block_ids))
                offsets = np.frombuffer(far.offsets, "<u8").reshape(-1, len(group.pages))[rows]
                runs = np.stack((offsets, slots.offsets, slots.capacities), axis=2).astype(np.int64)
                remote = RemoteSegment(there.transfer_address, far.segment_id)
                step = max(1, _PORTION_BYTES // group.block_bytes)
                for first in range(0, len(rows), step):
                    some = slice(first, first + step)
                    transfer = ScatterTransfer(Op.READ, slots.segment, remote, runs[some].reshape(-1, 3))
                    batch = self._engine.submit([transfer], deadline_s=self._settings.timeout_s)
                    stack.callback(_await, batch)  # nothing is written any more once the load has ended
                    checksums = [far.checksums[row] for row in rows[some]]
                    reads.append((group, block_ids[some], slots.at(range(len(rows))[some]), checksums, batch))
            self._count("failed_blocks/missing", len(bad))
            for group, block_ids, slots, checksums, batch in reads:
                batch.wait()
                right = [slots.checksum(place) == expected for place, expected in enumerate(checksums)]
                bad |= {block_id for block_id, is_right in zip(block_ids, right, strict=True) if not is_right}
                self._count("failed_blocks/checksum", right.count(False))
                self._count_loaded("fetched", group, sum(right))
        if bad:
            log.error("request %s: %d blocks from the prefill server are missing or damaged", load.request_id, len(bad))
        return bad

    def _count_loaded(self, op: str, group: CacheGroup, num_blocks: int) -> None:
        self._count(f"bytes/{op}", num_blocks * group.block_bytes)
        if group is self._counted:
            self._count(f"tokens/{op}", num_blocks * group.block_size)

    # Saves, in threads

    def _save(self, save: Save) -> None:
        try:
            self._put(save)
        except MoonserveError as error:
            self._saves_again_at = time.monotonic() + _REST_S
            self._save_outages.failed(save.request_id, error)
            self._count_skipped(save, _reason(error))
        except Exception:  # a fault of the connector must not stop the server
            log.exception("request %s: its KV is not stored", save.request_id)
            self._count_skipped(save, "internal")
        finally:
            self._ended_pins.append(save.pin_id)

    def _put(self, save: Save) -> None:
        if self._store is None:
            return
        if time.monotonic() < self._saves_again_at:
            self._count_skipped(save, "resting")
            return
        for group, of_group, blocks, keys in zip(self._groups, self._keys, save.groups, save.keys, strict=True):
            if not blocks.places:
                continue
            stored = of_group.blocks(keys, blocks.places)
            with self._memory.reading(group, blocks.block_ids) as slots:
                self._store.batch_put_gathered(stored, slots, hints=save.hints, timeout_s=self._settings.timeout_s)
            self._count_loaded("stored", group, len(blocks.places))

    def _count_skipped(self, save: Save, reason: str) -> None:
        self._failed_saves.append(save.pin_id)  # before the end of its pin is told
        self._count(f"skipped_saves/{reason}", sum(len(blocks.places) for blocks in save.groups))


_REASONS: dict[type[MoonserveError], str] = {
    PeerLost: "unreachable",
    DeadlineExceeded: "timeout",
    StaleLease: "expired",
    Overloaded: "full",
}


def _await(batch: Batch) -> None:
    with contextlib.suppress(MoonserveError):
        batch.wait()


def _reason(error: MoonserveError) -> str:
    return _REASONS.get(type(error), "refused")
