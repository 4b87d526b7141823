"""`python -m benchmarks.serving.overload`: four times the load that the cluster sustains, for two minutes.

Claims, as a client sees them:
1. at least 95 % of accepted requests keep both objectives;
2. the other requests get 429 within 50 ms (99th percentile), with a `Retry-After`;
3. at least 90 % of requests that return after `Retry-After` (before the end) are accepted;
4. memory of gateway and conductor is flat: after the first minute it grows by at most 5 %.
The sustainable rate is measured first: the completions per second of a closed loop, lowered until random arrivals at
that rate are accepted (99 %) and keep their objectives (95 %). A share `--obeying` of rejected requests returns once,
when `Retry-After` says; the others give up. Prompts never repeat, so no cache helps. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.harness.measure import table, write_json
from moonserve.deploy.launcher.local_cluster import running_cluster
from moonserve.protocol.latency import percentile

PROMPT_TOKENS = 384
OUTPUT_TOKENS = 24
TTFT_SLO_S = 1.5
TBT_SLO_S = 0.25
FACTOR = 4.0
CONCURRENCY = 16
PROBE_S = 12.0
LOWER_BY = 0.85
MAX_PROBES = 5
VOCAB = 4_000  # ids below it are ordinary tokens of the demo model
STORE = "64MiB"  # small, so that the store and the conductor's index of it are soon full
FLAT_AFTER_S = 60.0  # the conductor first fills its history of 4,096 decisions
LAG_EVERY_S = 0.02
BARS = {
    "kept_share": (">=", 0.95),
    "rejected_within_50_ms_p99": ("<=", 50.0),
    "let_in_when_back": (">=", 0.90),
    "memory_growth": ("<=", 0.05),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Result of one attempt, in seconds."""

    at: float
    status: int
    replied_s: float  # time to the headers of the reply
    ttft_s: float | None = None
    tbt_s: float | None = None  # mean of the longest tenth of the gaps
    retry_after_s: float | None = None
    is_retry: bool = False

    @property
    def meets_slo(self) -> bool:
        return self.ttft_s is not None and self.ttft_s <= TTFT_SLO_S and (self.tbt_s is None or self.tbt_s <= TBT_SLO_S)


class Client:
    """Sends requests over persistent connections."""

    def __init__(self, url: str, seed: str) -> None:
        self._url = f"{url}/v1/completions"
        self._rng = random.Random(seed)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def body(self) -> bytes:
        """Returns the body of a request with a new prompt."""
        prompt = [self._rng.randrange(16, VOCAB) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        return json.dumps({**body, "return_token_ids": True, "temperature": 0}).encode()

    async def ask(self, body: bytes, *, is_return: bool = False) -> Attempt:
        began = time.monotonic()
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as reply:
            replied_s = time.monotonic() - began
            if reply.status != 200:
                await reply.read()
                retry_after = reply.headers.get("retry-after")
                return Attempt(
                    at=began,
                    status=reply.status,
                    replied_s=replied_s,
                    retry_after_s=None if retry_after is None else float(retry_after),
                    is_retry=is_return,
                )
            instants = [time.monotonic() async for line in reply.content if _has_token(line)]
        gaps = sorted((b - a for a, b in itertools.pairwise(instants)), reverse=True)
        longest = gaps[: max(1, len(gaps) // 10)]
        return Attempt(
            at=began,
            status=200,
            replied_s=replied_s,
            ttft_s=instants[0] - began if instants else None,
            tbt_s=sum(longest) / len(longest) if longest else None,
            is_retry=is_return,
        )


def _has_token(line: bytes) -> bool:
    return line.startswith(b"data: {") and b'"token_ids":[' in line.replace(b" ", b"")


async def closed_loop(client: Client, seconds: float) -> float:
    """Returns the completions per second of clients that each send requests without a pause."""
    end, count = time.monotonic() + seconds, 0

    async def ask_on() -> None:
        nonlocal count
        while time.monotonic() < end:
            asked = await client.ask(client.body())
            count += asked.status == 200 and time.monotonic() < end

    await asyncio.gather(*(ask_on() for _ in range(CONCURRENCY)))
    return count / seconds


async def open_loop(rate: float, seconds: float, ask: Callable[[], Awaitable[None]], rng: random.Random) -> None:
    """Starts requests at random times, independent of earlier ones. Returns when all have ended."""
    end, at = time.monotonic() + seconds, time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        while (at := at + rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.create_task(_ran(ask()))


async def _ran(asking: Awaitable[None]) -> None:
    await asking


async def sustainable_rate(client: Client, rng: random.Random) -> tuple[float, list[Any]]:
    """Returns the sustainable requests per second, and the results of each rate that was tried."""
    rate = await closed_loop(client, PROBE_S)
    tried = []
    for _ in range(MAX_PROBES):
        asked: list[Attempt] = []

        async def ask(into: list[Attempt] = asked) -> None:
            into.append(await client.ask(client.body()))

        await open_loop(rate, PROBE_S, ask, rng)
        accepted = sum(a.status == 200 for a in asked) / len(asked)
        kept = sum(a.meets_slo for a in asked) / len(asked)
        tried.append({"rate": rate, "accepted": accepted, "kept": kept})
        if accepted >= 0.99 and kept >= 0.95:
            break
        rate *= LOWER_BY
    return rate, tried


async def watch_lag(lags_ms: list[float]) -> None:
    """Records by how much this client is late, until cancelled. The lag limits the precision of all measured times."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags_ms.append(1000 * (time.monotonic() - due))


@dataclass(slots=True)
class MemorySampler:
    """Resident bytes of processes by name, sampled once a second."""

    processes: dict[str, psutil.Process]
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    async def watch(self) -> None:
        """Samples until cancelled."""
        began = time.monotonic()
        while True:
            for name, process in self.processes.items():
                at = time.monotonic() - began
                self.samples.setdefault(name, []).append((at, process.memory_info().rss))
            await asyncio.sleep(1.0)

    def growth(self, name: str, until_s: float) -> tuple[float, float, float]:
        """Returns MiB after FLAT_AFTER_S, MiB at the end, and the growth as a share."""
        samples = [(at, rss) for at, rss in self.samples[name] if at <= until_s]
        early = [rss for at, rss in samples if FLAT_AFTER_S <= at <= FLAT_AFTER_S + 10] or [samples[0][1]]
        late = [rss for _, rss in samples[-10:]]
        before, after = sum(early) / len(early), sum(late) / len(late)
        return before / 2**20, after / 2**20, after / before - 1.0


async def overload(
    client: Client,
    rate: float,
    options: argparse.Namespace,
    memory: MemorySampler,
    lags_ms: list[float],
) -> list[Attempt]:
    """Returns all attempts. Requests that may return only later than `--settle` after the end do not return."""
    seconds, settle_s, obeying = options.seconds, options.settle, options.obeying
    rng, asked = random.Random("overload"), list[Attempt]()
    end = time.monotonic() + seconds + settle_s

    async def ask() -> None:
        body = client.body()
        first = await client.ask(body)
        asked.append(first)
        wait_s = first.retry_after_s
        if first.status != 429 or wait_s is None or rng.random() >= obeying:
            return
        if time.monotonic() + wait_s < end:
            await asyncio.sleep(wait_s)
            asked.append(await client.ask(body, is_return=True))

    watching = [asyncio.create_task(each) for each in (memory.watch(), watch_lag(lags_ms))]
    try:
        await open_loop(rate, seconds, ask, rng)
    finally:
        for task in watching:
            task.cancel()
    return asked


def figures(asked: Sequence[Attempt], memory: MemorySampler, seconds: float) -> dict[str, Any]:
    accepted = [a for a in asked if a.status == 200]
    rejected = [a for a in asked if a.status == 429]
    returns = [a for a in asked if a.is_retry]
    rejected_ms = [1000 * a.replied_s for a in rejected]
    memories = {name: memory.growth(name, seconds) for name in memory.processes}
    return {
        "asked": len(asked),
        "accepted": len(accepted),
        "rejected": len(rejected),
        "other_statuses": sorted({a.status for a in asked} - {200, 429}),
        "without_retry_after": sum(a.retry_after_s is None for a in rejected),
        "kept_share": sum(a.meets_slo for a in accepted) / max(1, len(accepted)),
        "ttft_p50_s": percentile([a.ttft_s or 1e9 for a in accepted], 50),
        "ttft_p95_s": percentile([a.ttft_s or 1e9 for a in accepted], 95),
        "tbt_p95_s": percentile([a.tbt_s or 0.0 for a in accepted], 95),
        "rejected_p50_ms": percentile(rejected_ms, 50),
        "rejected_within_50_ms": sum(ms <= 50 for ms in rejected_ms) / max(1, len(rejected)),
        "rejected_within_50_ms_p99": percentile(rejected_ms, 99),
        "retry_after_p50_s": percentile([a.retry_after_s or 0.0 for a in rejected], 50),
        "retry_after_max_s": max(a.retry_after_s or 0.0 for a in rejected),
        "came_back": len(returns),
        "let_in_when_back": sum(a.status == 200 for a in returns) / max(1, len(returns)),
        "memory_mib": {name: [round(v, 3) for v in each] for name, each in memories.items()},
        "memory_growth": max(growth for _, _, growth in memories.values()),
    }


def claims(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    checked = {}
    for name, (sign, bar) in BARS.items():
        value = result[name]
        met = value >= bar if sign == ">=" else value <= bar
        checked[name] = {"value": value, "bar": f"{sign} {bar:g}", "met": met}
    return checked


async def measure(url: str, launcher: int, options: argparse.Namespace) -> dict[str, Any]:
    children = {_name(child): child for child in psutil.Process(launcher).children()}
    memory = MemorySampler({name: children[name] for name in ("gateway-0", "conductor")})
    async with Client(url, f"overload {time.time_ns()}") as client:
        await closed_loop(client, 5.0)  # trains cost models and opens connections
        rate, tried = options.rate, list[Any]()
        if rate is None:
            rate, tried = await sustainable_rate(client, random.Random("rates"))
        await asyncio.sleep(2.0)
        lags_ms: list[float] = []
        asked = await overload(client, FACTOR * rate, options, memory, lags_ms)
    result = {
        "sustainable_rate": rate,
        "tried": tried,
        **figures(asked, memory, options.seconds),
        "client_lag_p50_ms": percentile(lags_ms, 50),
        "client_lag_p99_ms": percentile(lags_ms, 99),
        "accepted_per_s": sum(a.status == 200 and a.at <= asked[0].at + options.seconds for a in asked)
        / options.seconds,
    }
    return {**result, "claims": claims(result)}


def _name(child: psutil.Process) -> str:
    arguments = child.cmdline()
    return arguments[arguments.index("--instance-id") + 1] if "--instance-id" in arguments else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, help="sustainable requests/s, if known; else measured")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds for late returns")
    parser.add_argument("--obeying", type=float, default=0.25, help="share that comes back")
    parser.add_argument("--output", type=Path, default=Path("out/overload.json"))
    options = parser.parse_args()
    objectives = ("--ttft-slo", str(TTFT_SLO_S), "--tbt-slo", str(TBT_SLO_S))
    flags = ("--num-threads", "1", "--dram", STORE, *objectives)
    with (
        tempfile.TemporaryDirectory() as log_dir,
        running_cluster(None, *flags, log_dir=Path(log_dir)) as cluster,
    ):
        result = asyncio.run(measure(cluster.url, cluster.process.pid, options))
    shown = [[name, value] for name, value in result.items() if name not in ("claims", "tried")]
    print(table(["figure", "value"], shown))
    print(
        table(
            ["claim", "value", "bar", "met"],
            [[name, c["value"], c["bar"], c["met"]] for name, c in result["claims"].items()],
        )
    )
    write_json(options.output, result)
    return 0 if all(claim["met"] for claim in result["claims"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
