"""Clients who ask for known tokens all the time, come back when they are refused, and keep count of what they got.

What a client may meet: its tokens; a refusal with a status that says when or why (429, 503, 504); an error event in its
stream; a connection that breaks, when the gateway died. After any of these it asks again. What it must never meet:
another token, a stream that just ends, silence beyond its patience.

The right tokens are computed by one coupled engine before the cluster starts: native kernels compute the same bits in
any chunks (ARCHITECTURE.md, invariant 6). Prompts and arrivals are a trace's, shortened.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

from benchmarks.generate import generate
from engine.config import load_model_config
from engine.engine import Engine
from protocol.request import SamplingParams
from tests.chaos.faults import Clock
from traces.format import TraceRecord, read_trace
from traces.prompts import PromptBuilder

BLOCK_SIZE = 16
NUM_BLOCKS = 4_096
MAX_PROMPT, MAX_OUTPUT = 400, 48
SHORTENED = 1 / 24
"""Prompts: of a thousand tokens remain some forty."""
NUM_CLIENTS = 6
SILENCE_S = 60.0
"""Nothing comes for so long: a hang. Longer than the gateway looks for a worker, and than any stop."""
GIVE_UP_S = 120.0
"""A wish that could not be met for so long, asked again and again, is lost."""
PAUSE_S = (0.2, 1.0)
REFUSALS = frozenset({408, 429, 500, 503, 504})


class Refused(Exception):
    """A clean no; `how` is counted."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Wrong(Exception):
    """What no fault excuses."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One request."""

    prompt: list[int]
    tokens: list[int]  # that it must get

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
    """Of the first `count` requests of the trace."""
    config = load_model_config(model)
    records = [_shortened(record) for record in read_trace(trace, count)]
    builder = PromptBuilder(config.vocab_size)
    prompts = [builder.prompt(record) for record in records]
    outputs = [record.output_length for record in records]
    engine = Engine.load(
        model,
        config=config,
        layout=config.kv_layout(BLOCK_SIZE, "float32"),
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        kernels="native",
    )
    wanted = [SamplingParams(max_tokens=output, temperature=0.0) for output in outputs]
    found = generate(engine, prompts, wanted)
    return [Wish(prompt, each.token_ids) for prompt, each in zip(prompts, found, strict=True)]


def _shortened(record: TraceRecord) -> TraceRecord:
    shorter = record.scaled(SHORTENED, 1 / 8, 1.0)
    return TraceRecord(
        arrived_s=shorter.arrived_s,
        input_length=min(shorter.input_length, MAX_PROMPT),
        output_length=max(4, min(shorter.output_length, MAX_OUTPUT)),
        hash_ids=shorter.hash_ids,
        tokens_per_hash=shorter.tokens_per_hash,
    )


@dataclass(slots=True, eq=False)
class Tally:
    """Of all clients."""

    kept: int = 0  # at the first attempt
    retried: int = 0  # kept, but only after the client had asked again
    lost: int = 0
    wrong: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # by what was said
    num_tokens: int = 0
    longest_gap_s: float = 0.0  # between two tokens of one stream that went well
    complaints: list[str] = field(default_factory=list)


class Clients:
    """Run for as long as they are told to; what is under way then is awaited."""

    def __init__(self, url: str, wishes: Sequence[Wish], seed: int, clock: Clock) -> None:
        self.tally = Tally()
        self._url = url
        self._wishes = wishes
        self._dice = random.Random(seed)
        self._clock = clock
        self._next = 0
        self._ends_at = 0.0

    async def run(self, duration_s: float) -> None:
        """For so long, or until SIGINT."""
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
        """Raises Refused or Wrong; the latter, too, after `SILENCE_S` in which nothing came."""
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

    async def _read(self, client: httpx.AsyncClient, wish: Wish, heard: _Heard) -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=wish.body()) as response:
                if response.status_code in REFUSALS:
                    raise Refused(str(response.status_code))
                if response.status_code != 200:
                    raise Wrong(f"{response.status_code}: {await response.aread()!r}")
                await self._compare(response, wish, heard)
        except httpx.TransportError as error:
            raise Refused(f"connection broken: {type(error).__name__}") from error

    async def _compare(self, response: httpx.Response, wish: Wish, heard: _Heard) -> None:
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
    """Of one stream."""

    at: float  # when something came last
    tokens: list[int] = field(default_factory=list)
