"""The same fleet twice: simulated, and with conductors as real processes in real time.

`python -m benchmarks.conductor.fleet --compare --instances 64 --shards 4 --rate 200 --load 0.4 --warm-s 8
--measured-s 16` sends the same prompts to both. The live side has the same models of instances as the simulation;
placements, reports, summaries and heartbeats go over sockets, by the product's clients. Addresses, which decide who
gets what, are equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import uvloop

from benchmarks.conductor.fleet.live import TIMEOUT_S, started_conductor
from benchmarks.conductor.fleet.simulation import DECODE_S, Fleet, Instance
from benchmarks.conductor.fleet.workload import Prompt, Scenario, Served, Sessions, hit_ratio
from moonserve.conductor.events import Place, Report
from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.membership.heartbeats import BlockLog, Membership
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.process.lifecycle import infrequent_gc
from moonserve.protocol.request import Placement, RequestId
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import from_message, to_message

NO_LIMIT = ("--ttft-slo", "1e6", "--tbt-slo", "1e6")
Row = dict[str, Any]


def compared_rows(scenario: Scenario) -> list[Row]:
    """Runs both and returns a row for each, and one with live ÷ simulated."""
    scenario = replace(scenario, reports_changes=True)
    ports = [free_port() for _ in range(scenario.num_shards)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(started_conductor(port, ",".join(addresses), scenario.num_shards, token, *NO_LIMIT))
        live = uvloop.run(_live(scenario, addresses, token))
    simulated = Fleet(scenario, addresses)
    with infrequent_gc():
        simulated.run()
    rows = [_row("simulated", simulated), _row("live", live)]
    ratios = {name: rows[1][name] / rows[0][name] for name in rows[0] if name not in ("fleet", "prompts")}
    placing_ms = float(np.median(live.placing_s)) * 1e3
    print(f"median placement, live: {placing_ms:.1f} ms", file=sys.stderr)
    return [*rows, {"fleet": "live ÷ simulated", "prompts": "", **ratios}]


async def _live(scenario: Scenario, addresses: Sequence[str], token: str) -> LiveFleet:
    async with Channels(token) as channels:
        fleet = LiveFleet(scenario, addresses, channels)
        with infrequent_gc():
            await fleet.run_live()
    return fleet


def _row(name: str, fleet: Fleet) -> Row:
    served: list[Served] = [each for each in fleet.served if each.at >= fleet.scenario.warm_s]
    ttft_ms = [each.ttft_s * 1e3 for each in served]
    percentiles = {f"TTFT p{share} ms": float(np.percentile(ttft_ms, share)) for share in (50, 90, 99)}
    return {"fleet": name, "prompts": len(served), "hit ratio": hit_ratio(served), **percentiles}


class LiveFleet(Fleet):
    """The simulation's instances behind real conductors. What they compute ends at the instant at which it should, in
    spite of late timers; a placement counts when its reply arrives."""

    def __init__(self, scenario: Scenario, addresses: Sequence[str], channels: Channels) -> None:
        super().__init__(scenario, addresses)
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._channels = channels
        self._client = ConductorClient(channels, ",".join(addresses))
        self._logs = {name: BlockLog() for name in self._instances}
        self._tasks: set[asyncio.Task[None]] = set()
        self.placing_s: list[float] = []  # from each prompt's arrival to its placement

    async def run_live(self) -> None:
        scenario = self.scenario
        memberships = [self._membership(instance) for instance in self._instances.values()]
        for membership in memberships:
            self._hold(membership.run())
        await asyncio.gather(*(membership.registered.wait() for membership in memberships))
        await self._until_shared()
        sessions = Sessions(scenario.rate, scenario.seed)
        for prompt in sessions.waiting:
            await self._place(prompt, self._answered)
        while self._earlier:
            self._forget_earlier()
        await asyncio.sleep(1.0)  # heartbeats with what is cached
        self._began_at = self._loop.time()
        self.placing_s.clear()
        for prompt in sessions.until(scenario.warm_s + scenario.measured_s):
            await asyncio.sleep(prompt.at - (self._loop.time() - self._began_at))
            self._hold(self._place(prompt, self._begin))
        await asyncio.sleep(DECODE_S)

    def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Instances

    def _membership(self, instance: Instance) -> Membership:
        registration = to_message(
            conductor_pb2.RegisterRequest, self._registration(instance), transfer_bytes_per_s=1e12
        )
        return Membership(
            self._channels, ",".join(self.addresses), registration,
            lambda: to_message(conductor_pb2.Load, self._load(instance)), self._logs[instance.name],
        )  # fmt: skip

    async def _until_shared(self) -> None:
        """Waits until all shards are there and have as many instances."""
        share = self.scenario.num_prefills // self.scenario.num_shards
        stubs = [conductor_pb2_grpc.ConductorStub(self._channels.to(address)) for address in self.addresses]
        while True:
            calls = (self._channels.call(s.Exchange, conductor_pb2.ShardSummary(), timeout_s=TIMEOUT_S) for s in stubs)
            with contextlib.suppress(PeerLost):
                if all(each.num_prefills >= share <= each.num_decodes for each in await asyncio.gather(*calls)):
                    return
            await asyncio.sleep(0.25)

    def _cache(self, instance: Instance, keys: Sequence[BlockKey]) -> None:
        super()._cache(instance, keys)
        log = self._logs[instance.name]
        for key, parent in instance.changes.items():
            if parent is None:
                log.removed(key)
            else:
                log.added(key, parent)
        instance.changes.clear()

    # Time and conductors

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_at(self._began_at + when, self._due, when, what, arguments)

    def _due(self, when: float, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.now = when
        what(*arguments)

    async def _place(self, prompt: Prompt, begin: Callable[[str, Placement, Prompt], None]) -> None:
        place = Place(
            request_id=RequestId(f"{prompt.session}@{prompt.at}"), block_keys=prompt.keys,
            num_prompt_tokens=prompt.num_tokens, max_tokens=500,
        )  # fmt: skip
        request = to_message(conductor_pb2.PlaceRequest, place)
        reply = await self._client.call(lambda stub: stub.Place, request, timeout_s=TIMEOUT_S)
        self.now = self._loop.time() - self._began_at
        self.placing_s.append(self.now - prompt.at)
        begin(self.addresses[0], from_message(Placement, reply.placement), prompt)  # which shard it was is not needed

    def _handle(self, address: str, event: Any) -> None:
        assert isinstance(event, Report)
        self._hold(self._report(event))

    async def _report(self, report: Report) -> None:
        request = to_message(conductor_pb2.ReportRequest, report)
        await self._client.call(lambda stub: stub.Report, request, timeout_s=TIMEOUT_S)
