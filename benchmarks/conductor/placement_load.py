"""The load of `benchmarks.conductor`: a cluster, and scripts of events for `ConductorState`.

It owns the block keys and a script of events per round, all drawn from one seed. It does not depend on decisions, so
that a script exists before time is measured: heartbeats report the load of evenly spread requests.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.conductor.events import BlockChanges, Event, Heartbeat, Place, Register, Report
from moonserve.conductor.events import Load as InstanceLoad
from moonserve.conductor.placement.admission import Limits
from moonserve.conductor.placement.policies import make_policy
from moonserve.conductor.state import ConductorState
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey, KvLayout, iter_keys
from moonserve.protocol.request import Endpoint, InstanceId, RequestId, RequestPhase, Role
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile

PROMPT_BLOCKS = 128
COMMON_BLOCKS = 8  # first blocks of every chain
IDLE_CHANGES = 256  # per heartbeat if placed prompts add no blocks
KEPT_BLOCKS = 512  # latest blocks that an instance keeps; few, so that the index soon stops growing
HEARTBEAT_S = 1.0
LAYOUT = KvLayout(num_layers=8, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
PREFILL = PrefillProfile(c0=5e-4, c1=2e-7, c2=1e-13)  # fast, so that the benchmark does not measure overload
DECODE = DecodeProfile(c0=0.005, c1=1e-5, c2=1e-9)
TTFT_S, LIFE_S = 0.05, 1.0
POOL_BLOCKS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    num_instances: int  # half of them prefill, half decode
    num_blocks: int  # in the stores' index
    new_blocks_per_prompt: int = 0  # new blocks that each placed prompt adds

    @property
    def num_prefills(self) -> int:
        return self.num_instances // 2


@dataclass(slots=True, eq=False)
class _ChangeLog:
    """Sequence of one instance's block changes."""

    next_seq: int = 1
    held: deque[BlockKey] | None = None  # reported blocks that are not removed, oldest first

    def changes(self, keys: list[BlockKey], num_kept: int) -> BlockChanges:
        """Returns changes that add new blocks and remove the oldest ones beyond `num_kept`."""
        held = self.held if self.held is not None else deque()
        self.held = held
        held.extend(keys)
        removed = tuple(held.popleft() for _ in range(max(len(held) - num_kept, 0)))
        first = self.next_seq
        self.next_seq += len(keys) + len(removed)
        parents = (NO_PARENT, *keys)
        added = tuple(zip(keys, parents, strict=False))
        return BlockChanges(first_seq=first, next_seq=self.next_seq, added=added, removed=removed)


class Load:
    """Creates the cluster and, round by round, its events."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(scenario.num_blocks)
        num_chains = max(scenario.num_blocks // (PROMPT_BLOCKS - COMMON_BLOCKS), 1)
        shape = (num_chains, PROMPT_BLOCKS - COMMON_BLOCKS, KEY_BYTES)
        self._chains = self._rng.integers(0, 256, shape, dtype=np.uint8)
        self._common = self._rng.bytes(COMMON_BLOCKS * KEY_BYTES)
        self._names = [f"{role}-{n}" for role in ("prefill", "decode", "store") for n in range(self._half)]
        self.rate = 5_000.0  # placements per virtual second
        self._now = 0.0
        self._num_placed = 0
        self._tellers: dict[str, _ChangeLog] = {}
        self._due: list[tuple[float, int, Event]] = []  # heap by time

    @property
    def _half(self) -> int:
        return self._scenario.num_prefills

    def cluster(self, policy: str) -> ConductorState:
        """Returns a state with all instances and blocks, and resets the script."""
        limits = Limits(ttft_slo_s=1e6, tbt_slo_s=1e6, heartbeat_interval_s=HEARTBEAT_S)
        state = ConductorState(make_policy(policy, 1.25), limits)
        self._tellers = {name: _ChangeLog() for name in self._names}
        self._due = []
        for name in self._names:
            state.handle(self._register(name), self._now)
        for inventory in self._inventories():
            state.handle(inventory, self._now)
        for index, name in enumerate(self._names):
            offset_s = HEARTBEAT_S * index / len(self._names)
            beat = self._heartbeat(name, [])
            heapq.heappush(self._due, (self._now + offset_s, index, beat))
        return state

    def script(self, num_placements: int, rate: float) -> list[tuple[float, Event]]:
        """Returns `num_placements` placements at this rate and all other events meanwhile, in order of time."""
        arrivals = self._now + np.cumsum(self._rng.exponential(1 / rate, num_placements))
        prompts = self._prompts(num_placements)
        events: list[tuple[float, Event]] = []
        for at, place in zip(arrivals.tolist(), prompts, strict=True):
            self._emit_due(at, events)
            events.append((at, place))
            self._follow(at, place)
        self._now = float(arrivals[-1])
        return events

    def _emit_due(self, until: float, events: list[tuple[float, Event]]) -> None:
        while self._due and self._due[0][0] <= until:
            at, index, event = heapq.heappop(self._due)
            if isinstance(event, Heartbeat) and index < len(self._names):
                fresh = [] if self._scenario.new_blocks_per_prompt else self._fresh(IDLE_CHANGES // 2)
                event = self._heartbeat(event.instance_id, fresh)
                heapq.heappush(self._due, (at + HEARTBEAT_S, index, event))
            events.append((at, event))

    def _follow(self, at: float, place: Place) -> None:
        """Schedules the events that a placement causes."""
        self._num_placed += 1
        order = len(self._names) + 4 * self._num_placed
        request_id = place.request_id
        phases = ((TTFT_S, RequestPhase.FIRST_TOKEN), (LIFE_S, RequestPhase.FINISHED))
        for number, (after_s, phase) in enumerate(phases):
            report = Report(request_id=request_id, phase=phase, elapsed_s=after_s, output_tokens=100)
            heapq.heappush(self._due, (at + after_s, order + number, report))
        if self._scenario.new_blocks_per_prompt:
            keys = list(place.block_keys[-self._scenario.new_blocks_per_prompt :])
            prefill = self._num_placed % self._half
            for number, name in enumerate((f"prefill-{prefill}", f"store-{prefill}")):
                beat = self._heartbeat(InstanceId(name), keys)
                heapq.heappush(self._due, (at + TTFT_S, order + 2 + number, beat))

    def _heartbeat(self, name: str, fresh: list[BlockKey]) -> Heartbeat:
        per_instance = self.rate / self._half
        running = int(per_instance * LIFE_S)
        tokens = PROMPT_BLOCKS * LAYOUT.block_size
        load = InstanceLoad(
            num_running=running,
            context_tokens=running * tokens,
            free_blocks=POOL_BLOCKS - running * PROMPT_BLOCKS,
            queued_tokens=0,
        )
        changes = self._tellers[name].changes(fresh, KEPT_BLOCKS) if fresh else None
        return Heartbeat(instance_id=InstanceId(name), epoch=1, load=load, changes=changes)

    def _register(self, name: str) -> Register:
        role, _, number = name.partition("-")
        endpoint = Endpoint(
            instance_id=name,
            epoch=1,
            rpc_address=f"{name}:1",
            transfer_address=f"{name}:2",
            host=f"decode-{number}" if role == "decode" else f"host-{number}",
        )
        if role == "store":
            return Register(endpoint=endpoint, role=Role.STORE, bytes_per_s=1e10)
        return Register(
            endpoint=endpoint,
            role=Role(role),
            layout=LAYOUT,
            fingerprint="benchmark",
            num_blocks=POOL_BLOCKS,
            prefill_profile=PREFILL,
            decode_profile=DECODE,
            home_store=InstanceId(f"store-{number}") if role == "prefill" else None,
            max_num_seqs=4_096,
            max_model_len=1_000_000,
            bytes_per_s=1e10,
        )

    def _inventories(self) -> Iterator[Heartbeat]:
        """Yields heartbeats that report each chain on one store, every eighth also on a second store, and every fourth
        on its prefill instance."""
        common = list(iter_keys(self._common))
        for name in self._names:
            yield self._heartbeat(name, common)
        for number in range(self._half):
            for name, chains in self._holdings(number):
                for some in np.array_split(chains, max(len(chains) * PROMPT_BLOCKS // 50_000, 1)):
                    keys = [k for c in some for k in iter_keys(self._chains[c].tobytes())]
                    if keys:
                        yield self._inventory(name, keys)

    def _holdings(self, number: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        every = np.arange(len(self._chains))
        home, second = every % self._half, (every + 1) % self._half
        yield f"store-{number}", every[(home == number) | ((second == number) & (every % 8 == 0))]
        yield f"prefill-{number}", every[(home == number) & (every % 4 == 0)]

    def _inventory(self, name: str, keys: list[BlockKey]) -> Heartbeat:
        teller = self._tellers[name]
        first = teller.next_seq
        teller.next_seq += len(keys)
        return Heartbeat(
            instance_id=InstanceId(name),
            epoch=1,
            load=InstanceLoad(free_blocks=POOL_BLOCKS),
            changes=BlockChanges(
                first_seq=first,
                next_seq=teller.next_seq,
                added=tuple((key, NO_PARENT) for key in keys),
            ),
        )

    def _prompts(self, count: int) -> Iterator[Place]:
        chains = self._rng.integers(0, len(self._chains), count).tolist()
        depths = self._rng.integers(0, PROMPT_BLOCKS - COMMON_BLOCKS, count).tolist()
        for number, (chain, depth) in enumerate(zip(chains, depths, strict=True)):
            known = self._common + self._chains[chain, :depth].tobytes()
            fresh = self._rng.bytes(PROMPT_BLOCKS * KEY_BYTES - len(known))
            yield Place(
                request_id=RequestId(f"request-{self._num_placed + 1}-{number}"),
                block_keys=tuple(iter_keys(known + fresh)),
                num_prompt_tokens=PROMPT_BLOCKS * LAYOUT.block_size + 1,
                max_tokens=200,
            )

    def _fresh(self, count: int) -> list[BlockKey]:
        return list(iter_keys(self._rng.bytes(count * KEY_BYTES)))
