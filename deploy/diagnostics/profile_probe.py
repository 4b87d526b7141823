"""Measures as a client how long a running cluster takes for known work, for `moonserve profile --serving`.

Sends new prompts, alone and next to others, and records when tokens arrive. The times that a prompt waited, loaded and
computed are the prefill worker's report, from the conductor's explanation. Rule: runs of one shape are far apart, and
compared shapes are measured in turn, so that other load on the machine disturbs some runs of each shape instead of all
runs of one. Fits no formula: `terms` does.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moonserve.deploy.diagnostics.profile_fit import Burst, BurstPrompt, Observations, PromptRun, StepRun
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.latency import Timeline
from moonserve.traces.client import ModelInfo, Outcome, StreamClient
from moonserve.traces.simulator.spec import CROWDED_BATCH

FIRST_TOKEN_ID = 16  # lower ids are special in most vocabularies
_OUTPUT_TOKENS = 12  # of a single prompt: enough for a step time in addition to the handoff
_STEADY_TOKENS = 64  # output of each stream of a batch
_BESIDE_PROMPT = 1024
_BESIDE_STREAMS = (1, CROWDED_BATCH)  # sizes of the batches that decode while prompts are computed
_BESIDE_CONTEXT = 256
_BESIDE_S = 2.0  # least duration of such a batch alone, so that several prompts are computed meanwhile
_BURST = 8  # prompts per prefill worker, sent at one moment
_BURSTS = 5  # per round of `_measure_concurrent`
_PUTS_S = 1.0  # pause in which the KV of a burst is written to stores
_SPREAD = (4 / 15, 8 / 15, 16 / 15, 32 / 15)  # lengths of a burst's prompts; the mean is 1
_REPORTED_WITHIN_S = 2.0
_ENOUGH_SHAPES = 4  # for three coefficients; measured regardless of the deadline
_TERMS = ("queue_s", "transfer_s", "prefill_s")  # the prefill worker's report in an explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Shapes to time. Shapes that do not fit the model are omitted."""

    prompt_tokens: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096, 7168)
    cached_shares: tuple[float, ...] = (0.5,)  # common prefix with a prompt that was sent before
    batches: tuple[int, ...] = (1, 4, 16, 32)
    contexts: tuple[int, ...] = (64, 512, 1536)
    load_prompt_tokens: int = 512  # mean length of prompts in the expected load
    load_answer_tokens: int = 64  # mean length of its answers
    max_pool_tokens: int = 40_000  # of all streams together; with more they would evict each other
    runs: int = 3


class Probe:
    """Measurements through one client. Each prompt is new to the cluster, or has an intended cached prefix."""

    def __init__(self, client: StreamClient, facts: ModelInfo, grid: Grid) -> None:
        """Raises ConfigError if the endpoint does not report its vocabulary size and longest prompt."""
        if facts.vocab_size is None or facts.max_model_len is None:
            raise ConfigError("the endpoint's /v1/models has no vocab_size and max_model_len")
        self._client = client
        self._model = facts.name
        self._vocab_size = facts.vocab_size
        self._longest = facts.max_model_len
        self._grid = grid
        self._random = np.random.default_rng(0)

    async def observe(self, num_prefill: int, budget_s: float) -> Observations:
        """Measures everything in about `budget_s` seconds, or longer if the first shapes take longer."""
        for num_tokens in (16, 256, 256):  # warm up connections and memory
            await self._measure_one(self._fresh(num_tokens))
        ends_at = time.monotonic() + budget_s
        prompts = await self._prompts(_after(0.5, ends_at))
        steps = await self._steps(_after(0.5, ends_at))
        step_s = min((run.seconds for run in steps), default=0.0)
        concurrent, bursts = await self._measure_concurrent(num_prefill, step_s, ends_at)
        return Observations(prompts=prompts, steps=steps, concurrent_prompts=concurrent, bursts=bursts)

    # -- prompts alone

    async def _prompts(self, deadline: float) -> list[PromptRun]:
        """Measures prompts in several runs, shortest first. The first run's time limits the number of shapes."""
        share_s = (deadline - time.monotonic()) / self._grid.runs
        fitting = [n for n in self._grid.prompt_tokens if n + _OUTPUT_TOKENS <= self._longest]
        found: list[PromptRun] = []
        for run in range(self._grid.runs):
            began = time.monotonic()
            if run and began > deadline:
                break
            kept = 0
            for num_tokens in fitting:
                is_late = time.monotonic() - began > share_s
                if run == 0 and kept >= _ENOUGH_SHAPES and is_late:
                    break
                found += await self._with_prefixes(num_tokens)
                kept += 1
            fitting = fitting[:kept]
        return found

    async def _with_prefixes(self, num_tokens: int) -> list[PromptRun]:
        """Measures a new prompt, then prompts with a common prefix."""
        first = self._fresh(num_tokens)
        kept = [int(num_tokens * share) for share in self._grid.cached_shares]
        later = [first[:count] + self._fresh(num_tokens - count) for count in kept]
        return [await self._measure_one(prompt) for prompt in (first, *later)]

    async def _measure_one(self, prompt: Sequence[int], num_others: int = 0, *, with_decode: bool = False) -> PromptRun:
        outcome = await self._complete(prompt, _OUTPUT_TOKENS)
        run = await self._prompt_run(outcome, len(prompt), num_others)
        return replace(run, with_decode=with_decode)

    async def _prompt_run(self, outcome: Outcome, num_tokens: int, num_others: int) -> PromptRun:
        timeline = _timeline(outcome)
        found = await self._explained(outcome)
        queue_s, load_s, compute_s = (float(found[name]) for name in _TERMS)
        gaps = timeline.gaps_s
        return PromptRun(
            machine=str(found["prefill"]),
            num_tokens=num_tokens,
            num_cached=outcome.cached_tokens,
            num_others=num_others,
            with_decode=False,
            ttft_s=timeline.ttft_s,
            placed_s=timeline.ttft_s - float(found["ttft_s"]),
            queue_s=queue_s,
            load_s=load_s,
            compute_s=compute_s,
            handoff_s=gaps[0] - float(np.median(gaps[1:])) if len(gaps) > 2 else None,
        )

    async def _burst(self, num_prefill: int) -> list[BurstPrompt]:
        """Sends prompts at one moment, so that the first are decoded while later ones are computed."""
        answer = min(self._grid.load_answer_tokens, self._longest // 2)
        mean = self._grid.load_prompt_tokens
        lengths = [min(round(mean * share) + 1, self._longest - answer) for share in _SPREAD]
        prompts = [self._fresh(lengths[number % len(lengths)]) for number in range(_BURST * num_prefill)]
        outcomes = await asyncio.gather(*(self._complete(each, answer) for each in prompts))
        return [
            BurstPrompt(
                prompt=await self._prompt_run(outcome, len(prompt), 0),
                sent_at=_timeline(outcome).arrived_at,
                token_at=_timeline(outcome).token_at,
            )
            for outcome, prompt in zip(outcomes, prompts, strict=True)
        ]

    async def _explained(self, outcome: Outcome) -> Mapping[str, Any]:
        """Returns the conductor's report of a request, with its machine as `prefill`. Polls, because reports travel
        apart from the tokens and may arrive after the last one. Raises ConfigError if the report stays incomplete."""
        ends_at = time.monotonic() + _REPORTED_WITHIN_S
        while True:
            record = await self._client.explain(outcome.request_id) or {}
            found = record.get("outcome") or {}
            missing = [name for name in ("ttft_s", *_TERMS) if found.get(name) is None]
            if not missing:
                return {**found, "prefill": record["prefill"]}
            if time.monotonic() > ends_at:
                raise ConfigError(
                    f"the endpoint does not explain what its prompts took: {', '.join(missing)} of "
                    f"{outcome.request_id} is not known"
                )
            await asyncio.sleep(0.05)

    # -- batches

    async def _steps(self, deadline: float) -> list[StepRun]:
        """Measures all batches in several runs, fewest tokens first, until the deadline."""
        shapes = [
            (batch, context)
            for context, batch in itertools.product(self._grid.contexts, self._grid.batches)
            if batch * (context + _STEADY_TOKENS) <= self._grid.max_pool_tokens
            and context + _STEADY_TOKENS <= self._longest
        ]
        shapes.sort(key=lambda shape: (shape[0] * shape[1], shape))
        found: list[StepRun] = []
        for _ in range(self._grid.runs):
            for batch, context in shapes:
                if len(found) >= _ENOUGH_SHAPES and time.monotonic() > deadline:
                    return found
                found += await self._batch(batch, context)
        return found

    async def _batch(self, batch: int, context: int) -> list[StepRun]:
        """Measures one batch. Its prompts are computed beforehand, so that all begin decode at about the same time."""
        prompts = [self._fresh(context) for _ in range(batch)]
        for prompt in prompts:
            await self._complete(prompt, 1)
        outcomes = await asyncio.gather(*(self._complete(p, _STEADY_TOKENS) for p in prompts))
        timelines = [_timeline(outcome) for outcome in outcomes]
        begin = max(timeline.token_at[0] for timeline in timelines)
        end = min(timeline.token_at[-1] for timeline in timelines)
        return steps_between(timelines, context, begin, end)

    # -- side by side

    async def _measure_concurrent(
        self, num_prefill: int, step_s: float, deadline: float
    ) -> tuple[list[PromptRun], list[Burst]]:
        """Measures in turn one prompt, several at once, both while a batch decodes, and bursts with answers."""
        prompts: list[PromptRun] = []
        bursts: list[Burst] = []
        while not bursts or time.monotonic() < deadline:
            for width in range(1, num_prefill + 1):
                prompts += _if_on_own_machines(await self._measure_at_once(width, width - 1), width)
            for width, streams in itertools.product(range(1, num_prefill + 1), _BESIDE_STREAMS):
                prompts += await self._measure_with_batch(width, streams, step_s)
            bursts += [await self._burst(num_prefill) for _ in range(_BURSTS)]
            await asyncio.sleep(_PUTS_S)
        return prompts, bursts

    async def _measure_at_once(self, width: int, num_others: int, *, with_decode: bool = False) -> list[PromptRun]:
        length = min(_BESIDE_PROMPT, self._longest - _OUTPUT_TOKENS)
        fresh = [self._fresh(length) for _ in range(width)]
        runs = (self._measure_one(each, num_others, with_decode=with_decode) for each in fresh)
        return list(await asyncio.gather(*runs))

    async def _measure_with_batch(self, width: int, num_streams: int, step_s: float) -> list[PromptRun]:
        """Sends `width` prompts repeatedly while a batch decodes; keeps runs that end before it. `step_s`: one step."""
        streams = [self._fresh(_BESIDE_CONTEXT) for _ in range(num_streams)]
        for prompt in streams:
            await self._complete(prompt, 1)
        wanted = int(_BESIDE_S / step_s) if step_s > 0.0 else 0
        length = min(self._longest - _BESIDE_CONTEXT, max(wanted, 8 * _STEADY_TOKENS))
        tasks = [asyncio.create_task(self._complete(p, length)) for p in streams]
        await asyncio.sleep(0.2)
        found: list[tuple[float, list[PromptRun]]] = []  # with the time of their end
        while not any(task.done() for task in tasks):
            runs = await self._measure_at_once(width, width, with_decode=True)
            found.append((time.monotonic(), runs))
            await asyncio.sleep(0.1)
        timelines = [_timeline(outcome) for outcome in await asyncio.gather(*tasks)]
        end = min(timeline.token_at[-1] for timeline in timelines)
        return [run for ended, runs in found if ended <= end for run in _if_on_own_machines(runs, width)]

    # -- prompts

    def _fresh(self, num_tokens: int) -> list[int]:
        tokens: list[int] = self._random.integers(FIRST_TOKEN_ID, self._vocab_size, num_tokens).tolist()
        return tokens

    async def _complete(self, prompt: Sequence[int], max_tokens: int) -> Outcome:
        outcome = await self._client.complete(self._model, prompt, max_tokens=max_tokens)
        if not outcome.succeeded:
            raise ConfigError(f"a prompt of {len(prompt)} tokens failed: {outcome.error}")
        return outcome


def _after(share: float, ends_at: float) -> float:
    """Returns the time when this share of the remaining time will have passed."""
    now = time.monotonic()
    return now + share * max(ends_at - now, 0.0)


def _timeline(outcome: Outcome) -> Timeline:
    assert outcome.timeline is not None, "it succeeded"
    return outcome.timeline


def steps_between(timelines: Sequence[Timeline], context: int, begin: float, end: float) -> list[StepRun]:
    """Returns the steps of streams that decode without others from `begin` to `end`. `context`: tokens per prompt.
    Empty for fewer than three steps, or if all tokens arrived at one instant. The step time is the mean gap: tokens
    that arrive together are separate steps, and waits for a processor count."""
    gaps: list[float] = []
    tokens = []
    for timeline in timelines:
        inside = [(n, at) for n, at in enumerate(timeline.token_at) if begin <= at <= end]
        if len(inside) < 4 or inside[0][1] == inside[-1][1]:
            return []
        gaps += [later - sooner for (_, sooner), (_, later) in itertools.pairwise(inside)]
        tokens.append(context + (inside[0][0] + inside[-1][0]) / 2)
    return [
        StepRun(
            num_seqs=len(timelines),
            prompt_tokens=context,
            context_tokens=round(sum(tokens)),
            num_others=0,
            seconds=float(np.mean(gaps)),
            gaps_s=tuple(gaps),
        )
    ]


def _if_on_own_machines(found: list[PromptRun], width: int) -> list[PromptRun]:
    """Returns the runs if each had its own machine; else none, because some waited for each other."""
    return found if len({run.machine for run in found}) == width else []
