"""A fleet in virtual time: active conductors, each a real `ConductorState`, over simple models of instances.

A prefill instance computes prompts one after another in order of arrival; it caches blocks in LRU order and reports
changes with its heartbeats. Decode instances hold sequences for a fixed time. The conductors exchange summaries with a
delay of one interval. Gateways see the summaries that the conductors see.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.conductor.fleet.workload import (
    BLOCK_TOKENS,
    OUTPUT_TOKENS,
    Prompt,
    Scenario,
    Served,
    Sessions,
)
from moonserve.conductor.events import (
    BlockChanges,
    Heartbeat,
    HeartbeatSeen,
    Load,
    Place,
    Placed,
    Redirected,
    Refused,
    Register,
    Report,
)
from moonserve.conductor.peers import ShardSummary
from moonserve.conductor.peers.shard_state import ShardState
from moonserve.conductor.placement.admission import AdmissionMode, Limits
from moonserve.conductor.placement.policies import make_policy
from moonserve.conductor.state import ConductorState
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, KvLayout
from moonserve.protocol.membership.heartbeats import GATHER_S
from moonserve.protocol.membership.shards import HotPrefixes, Shard, in_order, merged_hot, routing_key
from moonserve.protocol.request import Endpoint, InstanceId, Placement, RequestId, RequestPhase, Role
from moonserve.protocol.step_time import DecodeProfile

HEARTBEAT_S = 0.5
GOSSIP_S = 0.25
DECODE_S = 1.0
RETRY_S = 0.1
NUM_EARLIER_EXCHANGES = 400
EARLIER_IN_FLIGHT = 3  # per prefill instance
LAYOUT = KvLayout(num_layers=8, block_size=BLOCK_TOKENS, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DECODE = DecodeProfile(c0=DECODE_S / OUTPUT_TOKENS, c1=1e-9, c2=1e-15)
POOL_BLOCKS = 2**24


@dataclass(slots=True, eq=False)
class Instance:
    name: InstanceId
    role: Role
    shard: str = ""  # address; "" = registered nowhere
    queue: list[tuple[float, int, RequestId, Prompt]] = field(default_factory=list)  # heap by time + rank
    running: tuple[RequestId, Prompt] | None = None
    cache: OrderedDict[BlockKey, BlockKey] = field(default_factory=OrderedDict)  # key → parent
    changes: dict[BlockKey, BlockKey | None] = field(default_factory=dict)  # since the last heartbeat; None = removed
    next_seq: int = 1
    is_gathering: bool = False  # a heartbeat with the changes is due soon
    num_running: int = 0
    context_tokens: int = 0
    queued_tokens: int = 0


class Fleet:
    """Runs one scenario."""

    def __init__(self, scenario: Scenario, addresses: Sequence[str] = ()) -> None:
        """`addresses`: those of the shards; empty = any."""
        self.scenario = scenario
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self.now = 0.0
        self.served: list[Served] = []
        self.num_redirected = self._num_arrived = 0
        self.unplaced_s: list[float] = []  # time without placement of prompts whose shard was dead
        self.cpu_s: dict[str, float] = {}
        self.addresses = list(addresses) or [f"shard-{n}:1" for n in range(scenario.num_shards)]
        self._alive = set(self.addresses)
        self._cut: set[str] = set()
        self._conductors = {address: self._conductor(address) for address in self.addresses}
        self._told: dict[str, ShardSummary] = {}  # by the shards at the last exchange
        self._gateway: tuple[tuple[Shard, ...], HotPrefixes] = (), {}
        self._placed_by: dict[RequestId, tuple[str, Instance, Instance]] = {}
        self._instances: dict[str, Instance] = {}
        for n in range(scenario.num_prefills):
            for role in (Role.PREFILL, Role.DECODE):
                name = InstanceId(f"{role.value}-{n}")
                self._instances[name] = Instance(name, role)
        self._earlier: deque[tuple[str, RequestId]] = deque()
        self._prefills = [i for i in self._instances.values() if i.role is Role.PREFILL]

    def run(self) -> None:
        scenario = self.scenario
        shards = [Shard(address=address, weight=1.0) for address in self.addresses]
        self.now = -(NUM_EARLIER_EXCHANGES + 1) * GOSSIP_S
        for index, instance in enumerate(self._instances.values()):
            self._join(instance, shards)
            self._at(HEARTBEAT_S * index / len(self._instances), self._beat, instance)
        for number in range(-NUM_EARLIER_EXCHANGES, 0):  # sharing the instances equally, before any load
            self.now = number * GOSSIP_S
            self._exchange(again=False)
            for instance in self._instances.values() if number % 4 == 0 else ():
                self._send_heartbeat(instance)
        self.now = 0.0
        self._at(0.0, self._exchange)
        if scenario.dies_at is not None:
            self._at(scenario.dies_at, self._alive.discard, self.addresses[0])
        if scenario.cut_at is not None:
            self._at(scenario.cut_at, self._cut.add, self.addresses[0])
        if scenario.back_at is not None:
            self._at(scenario.back_at, self._restart)
        sessions = Sessions(scenario.rate, scenario.seed)
        for number, prompt in enumerate(sessions.waiting):
            self._arrive(prompt, 0.0, self._answered)
            if number % 500 == 0:
                self._exchange(again=False)
            if number % 200 == 0:
                self._send_heartbeat(self._prefills[number // 200 % len(self._prefills)])
        while self._earlier:
            self._forget_earlier()
        for instance in self._prefills:
            self._send_heartbeat(instance)
        self.cpu_s.clear()
        for prompt in sessions.until(scenario.warm_s + scenario.measured_s):
            self._run_until(prompt.at)
            self._num_arrived += 1
            self._arrive(prompt, prompt.at)
        self._run_until(self.now + DECODE_S)

    def num_lost(self) -> int:
        """Returns the prompts that were not answered within a second after the last arrival."""
        return self._num_arrived - len(self.served)

    def num_instances_of_first(self) -> str:
        """Returns the prefill instances of the first shard and of the largest."""
        counts = Counter(instance.shard for instance in self._prefills)
        return f"{counts[self.addresses[0]]} (most: {max(counts.values())})"

    # Time

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._number), what, arguments))

    def _run_until(self, end: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, what, arguments = heapq.heappop(heap)
            what(*arguments)
        self.now = end

    # Conductors

    def _conductor(self, address: str) -> tuple[ConductorState, ShardState]:
        limits = Limits(admission=AdmissionMode.NONE, ttft_slo_s=1e6, tbt_slo_s=1e6, lease_s=3.0, num_decisions=64)
        shard = ShardState(address)
        alone = self.scenario.num_shards == 1
        return ConductorState(make_policy(self.scenario.policy, 1.25), limits, None, None if alone else shard), shard

    def _handle(self, address: str, event: Any) -> Any:
        began_s = time.thread_time()
        action = self._conductors[address][0].handle(event, self.now)[-1]
        self.cpu_s[address] = self.cpu_s.get(address, 0.0) + time.thread_time() - began_s
        return action

    def _exchange(self, again: bool = True) -> None:
        """Delivers the summaries of the last exchange, and collects the next ones."""
        for address in self._alive:
            _, shard = self._conductors[address]
            for summary in self._told.values():
                if summary.address != address and {address, summary.address} & self._cut == set():
                    shard.hear(summary, self.now)
        if self.scenario.num_shards > 1:
            began_s = time.thread_time()
            self._told = {a: self._conductors[a][0].tick_shard(self.now) for a in sorted(self._alive)}
            self.cpu_s["exchange"] = self.cpu_s.get("exchange", 0.0) + time.thread_time() - began_s
            hot = merged_hot(told.hot for told in self._told.values())
            self._gateway = tuple(s.shard for s in self._told.values()), hot
        else:
            self._gateway = (Shard(address=self.addresses[0], weight=1.0),), {}
        if again:
            self._at(self.now + GOSSIP_S, self._exchange)

    def _restart(self) -> None:
        address = self.addresses[0]
        self._cut.clear()
        if address not in self._alive:
            self._conductors[address] = self._conductor(address)
            self._alive.add(address)

    # Instances

    def _join(self, instance: Instance, shards: Sequence[Shard]) -> None:
        key = instance.name.encode()
        for shard in in_order(key, shards):
            if shard.address in self._alive:
                self._register(instance, shard.address)
                return

    def _registration(self, instance: Instance) -> Register:
        endpoint = Endpoint(
            instance_id=instance.name, epoch=1, rpc_address=f"{instance.name}:1",
            transfer_address=f"{instance.name}:2", host=instance.name,
        )  # fmt: skip
        return Register(
            endpoint=endpoint, role=instance.role, layout=LAYOUT, fingerprint="fleet", num_blocks=POOL_BLOCKS,
            prefill_profile=self.scenario.profile, decode_profile=DECODE, max_num_seqs=100_000,
            max_model_len=10_000_000, bytes_per_s=1e12, max_num_batched_tokens=10**9,
        )  # fmt: skip

    def _register(self, instance: Instance, address: str) -> None:
        self._handle(address, self._registration(instance))
        instance.shard = address
        added = tuple(instance.cache.items())
        instance.changes.clear()
        self._heartbeat(instance, BlockChanges(
            first_seq=instance.next_seq, next_seq=instance.next_seq, added=added, snapshot=True,
        ))  # fmt: skip

    def _beat(self, instance: Instance) -> None:
        self._at(self.now + HEARTBEAT_S, self._beat, instance)
        self._send_heartbeat(instance)

    def _gathered(self, instance: Instance) -> None:
        instance.is_gathering = False
        self._send_heartbeat(instance)

    def _send_heartbeat(self, instance: Instance) -> None:
        if instance.shard not in self._alive:
            self._join(instance, [Shard(address=address, weight=1.0) for address in self.addresses])
            return
        added = tuple((key, parent) for key, parent in instance.changes.items() if parent is not None)
        removed = tuple(key for key, parent in instance.changes.items() if parent is None)
        first, instance.next_seq = instance.next_seq, instance.next_seq + len(instance.changes)
        instance.changes.clear()
        self._heartbeat(
            instance, BlockChanges(first_seq=first, next_seq=instance.next_seq, added=added, removed=removed)
        )

    def _load(self, instance: Instance) -> Load:
        return Load(
            num_waiting=len(instance.queue), num_running=instance.num_running or int(instance.running is not None),
            free_blocks=POOL_BLOCKS - instance.num_running * 24, queued_tokens=instance.queued_tokens,
            context_tokens=instance.context_tokens,
        )  # fmt: skip

    def _heartbeat(self, instance: Instance, changes: BlockChanges) -> None:
        beat = Heartbeat(instance_id=instance.name, epoch=1, load=self._load(instance), changes=changes)
        seen = self._handle(instance.shard, beat)
        assert isinstance(seen, HeartbeatSeen)
        if seen.resync:
            self._register(instance, instance.shard)
        elif not seen.known:
            self._register(instance, seen.move_to or instance.shard)

    # Requests

    def _arrive(
        self, prompt: Prompt, since: float, begin: Callable[[str, Placement, Prompt], None] | None = None
    ) -> None:
        shards, hot = self._gateway
        request_id = RequestId(f"{prompt.session}@{prompt.at}")
        key = routing_key(prompt.keys, hot, request_id.encode())
        place = Place(
            request_id=request_id, block_keys=prompt.keys, num_prompt_tokens=prompt.num_tokens, max_tokens=500
        )
        for shard in in_order(key, shards):
            if shard.address not in self._alive:
                continue
            address = shard.address
            answer = self._handle(address, place)
            if isinstance(answer, Redirected):
                self.num_redirected += 1
                if answer.address in self._alive:
                    address = answer.address
                moved = Place(
                    request_id=request_id, block_keys=prompt.keys, num_prompt_tokens=prompt.num_tokens,
                    max_tokens=500, is_redirected=True,
                )  # fmt: skip
                answer = self._handle(address, moved)
            if isinstance(answer, Placed):
                (begin or self._begin)(address, answer.placement, prompt)
                if self.now > since:
                    self.unplaced_s.append(self.now - since)
                return
            assert isinstance(answer, Refused), answer
        self._at(self.now + RETRY_S, self._arrive, prompt, since)

    def _answered(self, address: str, placement: Placement, prompt: Prompt) -> None:
        """Fills a cache with a prompt of an earlier time. Some stay in flight, so that placements spread."""
        self._cache(self._instances[placement.prefill.instance_id], prompt.keys)
        self._earlier.append((address, placement.request_id))
        if len(self._earlier) > EARLIER_IN_FLIGHT * self.scenario.num_prefills:
            self._forget_earlier()

    def _forget_earlier(self) -> None:
        address, request_id = self._earlier.popleft()
        self._handle(address, Report(request_id=request_id, phase=RequestPhase.CANCELLED, elapsed_s=0.0))

    def _begin(self, address: str, placement: Placement, prompt: Prompt) -> None:
        prefill = self._instances[placement.prefill.instance_id]
        decode = self._instances[placement.decode.instance_id]
        request_id = placement.request_id
        self._placed_by[request_id] = (address, prefill, decode)
        heapq.heappush(prefill.queue, (self.now + placement.rank, next(self._number), request_id, prompt))
        prefill.queued_tokens += prompt.num_tokens
        if prefill.running is None:
            self._compute(prefill)

    def _compute(self, instance: Instance) -> None:
        _, _, request_id, prompt = heapq.heappop(instance.queue)
        instance.running = request_id, prompt
        cache, hits = instance.cache, 0
        for key in prompt.keys:
            if key not in cache:
                break
            cache.move_to_end(key)
            hits += 1
        seconds = self.scenario.profile.seconds(prompt.num_tokens, hits * BLOCK_TOKENS)
        self._at(self.now + seconds, self._computed, instance, hits, seconds)

    def _computed(self, instance: Instance, hits: int, seconds: float) -> None:
        assert instance.running is not None
        request_id, prompt = instance.running
        instance.queued_tokens -= prompt.num_tokens
        self._cache(instance, prompt.keys)
        if self.scenario.reports_changes and instance.changes and not instance.is_gathering:
            instance.is_gathering = True
            self._at(self.now + GATHER_S, self._gathered, instance)
        address, _, decode = self._placed_by[request_id]
        ttft_s = self.now - prompt.at
        self.served.append(Served(prompt.at, ttft_s, hits, len(prompt.keys), address))
        decode.num_running += 1
        decode.context_tokens += prompt.num_tokens
        if address in self._alive:
            self._handle(address, Report(
                request_id=request_id, phase=RequestPhase.FIRST_TOKEN, elapsed_s=ttft_s,
                cached_tokens=hits * BLOCK_TOKENS, queue_s=ttft_s - seconds, transfer_s=0.0, prefill_s=seconds,
            ))  # fmt: skip
        self._at(self.now + DECODE_S, self._finished, request_id, prompt)
        instance.running = None
        if instance.queue:
            self._compute(instance)

    def _finished(self, request_id: RequestId, prompt: Prompt) -> None:
        address, _, decode = self._placed_by.pop(request_id)
        decode.num_running -= 1
        decode.context_tokens -= prompt.num_tokens
        if address in self._alive:
            report = Report(
                request_id=request_id, phase=RequestPhase.FINISHED, elapsed_s=self.now - prompt.at,
                output_tokens=OUTPUT_TOKENS,
            )  # fmt: skip
            self._handle(address, report)

    def _cache(self, instance: Instance, keys: Sequence[BlockKey]) -> None:
        cache, changes, parent = instance.cache, instance.changes, NO_PARENT
        for key in keys:
            if key in cache:
                cache.move_to_end(key)
            else:
                cache[key] = parent
                changes[key] = parent
            parent = key
        while len(cache) > self.scenario.cached_blocks:
            gone, _ = cache.popitem(last=False)
            if changes.pop(gone, None) is None:
                changes[gone] = None
