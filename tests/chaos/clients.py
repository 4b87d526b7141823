"""Chaos clients: request completions whose tokens are known, retry after refusals and count the outcomes.

A client may receive its tokens, a refusal (a status in REFUSALS), an error event in its stream, or a broken connection
if the gateway died. After any but the first it retries. It must never receive a wrong token, a stream that ends without
[DONE], or nothing for `SILENCE_S`.

The expected tokens are computed by one coupled engine before the cluster starts: native kernels compute the same bits
for any chunking (ARCHITECTURE.md, invariant 6). Prompts are those of a trace, shortened.
"""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2 as httpx

from benchmarks.harness.generate import generate
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.request import SamplingParams
from moonserve.traces.format import TraceRecord, read_trace
from moonserve.traces.workload.prompts import PromptBuilder
from tests.chaos.faults import Clock
from tests.engine.steps import load_engine

BLOCK_SIZE = 16
NUM_BLOCKS = 4_096
MAX_PROMPT, MAX_OUTPUT = 400, 48
SHORTENED = 1 / 24
"""Scale of prompt lengths: 1,000 tokens become about 40."""
NUM_CLIENTS = 6
SILENCE_S = 60.0
"""Silence after which a request counts as hung. Longer than the gateway's search for a worker, and than any stop."""
GIVE_UP_S = 120.0
"""Time after which a request that is retried all the while counts as lost."""
PAUSE_S = (0.2, 1.0)
REFUSALS = frozenset({408, 429, 500, 503, 504})


class Refused(Exception):
    """An allowed failure, after which the client retries. `how` names it in the tally."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Wrong(Exception):
    """A failure that no fault excuses."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A request with its expected tokens."""

    prompt: list[int]
    tokens: list[int]  # expected

    def body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "max_tokens": len(self.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }


def wishes(model: Path, trace: Path, count: int) -> list[Wish]:
    """Returns the first `count` requests of the trace, shortened, with their expected tokens."""
    records = [_shortened(record) for record in read_trace(trace, count)]
    builder = PromptBuilder(load_model_config(model).vocab_size)
    prompts = [builder.prompt(record) for record in records]
    outputs = [record.output_length for record in records]
    engine = load_engine(model, BLOCK_SIZE, num_blocks=NUM_BLOCKS, kernels="native")
    wanted = [SamplingParams(max_tokens=output, temperature=0.0) for output in outputs]
    found = generate(engine, prompts, wanted)
    return [Wish(prompt, each.token_ids) for prompt, each in zip(prompts, found, strict=True)]


def _shortened(record: TraceRecord) -> TraceRecord:
    shorter = record.scaled(SHORTENED, 1 / 8, 1.0)
    num_outputs = max(4, min(shorter.output_length, MAX_OUTPUT))
    return replace(shorter, input_length=min(shorter.input_length, MAX_PROMPT), output_length=num_outputs)


@dataclass(slots=True, eq=False)
class Tally:
    """Counts of all clients."""

    kept: int = 0  # succeeded at the first attempt
    retried: int = 0  # succeeded after at least one retry
    lost: int = 0
    wrong: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # by `Refused.how`
    num_tokens: int = 0
    longest_gap_s: float = 0.0  # between two chunks of one stream
    complaints: list[str] = field(default_factory=list)


class Clients:
    """Clients that send requests, one at a time each, for a given time."""

    def __init__(self, url: str, wishes: Sequence[Wish], seed: int, clock: Clock) -> None:
        self.tally = Tally()
        self._url = url
        self._wishes = wishes
        self._dice = random.Random(seed)
        self._clock = clock
        self._next = 0
        self._ends_at = 0.0

    async def run(self, duration_s: float) -> None:
        """Runs for `duration_s` seconds or until SIGINT, then awaits the requests in flight."""
        self._ends_at = self._clock.now() + duration_s
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._end)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._ask_on())

    def _end(self) -> None:
        self._ends_at = self._clock.now()

    async def _ask_on(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as client:
            while self._clock.now() < self._ends_at:
                wish = self._wishes[self._next % len(self._wishes)]
                self._next += 1
                await self._until_met(client, wish)
                await asyncio.sleep(self._dice.uniform(0.0, 0.2))

    async def _until_met(self, client: httpx.AsyncClient, wish: Wish) -> None:
        tally, began_at, attempts = self.tally, self._clock.now(), 0
        while self._clock.now() < began_at + GIVE_UP_S:
            attempts += 1
            try:
                await self._ask(client, wish)
            except Refused as refusal:
                tally.refusals[refusal.how] += 1
                await asyncio.sleep(self._dice.uniform(*PAUSE_S))
            except Wrong as error:
                tally.wrong += 1
                tally.complaints.append(str(error))
                return
            else:
                tally.kept += attempts == 1
                tally.retried += attempts > 1
                tally.num_tokens += len(wish.tokens)
                return
        tally.lost += 1
        tally.complaints.append(f"not met within {GIVE_UP_S:.0f} s, {attempts} attempts")

    async def _ask(self, client: httpx.AsyncClient, wish: Wish) -> None:
        """Sends one request. Raises Refused or Wrong; Wrong also if nothing arrives for `SILENCE_S`."""
        heard = _Heard(self._clock.now())
        asking = asyncio.create_task(self._read(client, wish, heard))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=1.0)
                if self._clock.now() > heard.at + SILENCE_S and not asking.done():
                    raise Wrong(f"silence for {SILENCE_S:.0f} s after {len(heard.tokens)} tokens")
            await asking
        finally:
            asking.cancel()

    async def _read(self, client: httpx.AsyncClient, wish: Wish, heard: "_Heard") -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=wish.body()) as response:
                if response.status_code in REFUSALS:
                    raise Refused(str(response.status_code))
                if response.status_code != 200:
                    raise Wrong(f"{response.status_code}: {await response.aread()!r}")
                await self._compare(response, wish, heard)
        except httpx.TransportError as error:
            raise Refused(f"connection broken: {type(error).__name__}") from error

    async def _compare(self, response: httpx.Response, wish: Wish, heard: "_Heard") -> None:
        heard.at, tokens = self._clock.now(), heard.tokens
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                if tokens != wish.tokens:
                    raise Wrong(f"{len(tokens)} of {len(wish.tokens)} tokens, and then the end")
                return
            if not line:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Refused(f"in the stream: {chunk['error']['code']}")
            tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            if tokens != wish.tokens[: len(tokens)]:
                raise Wrong(f"another token at {len(tokens) - 1} of {len(wish.tokens)}")
            now = self._clock.now()
            self.tally.longest_gap_s = max(self.tally.longest_gap_s, now - heard.at)
            heard.at = now
        raise Wrong(f"the stream just ended after {len(tokens)} of {len(wish.tokens)} tokens")


@dataclass(slots=True, eq=False)
class _Heard:
    """State of one stream."""

    at: float  # time of the last chunk
    tokens: list[int] = field(default_factory=list)
