"""What a running cluster takes for known work, seen from a client: the measurements of `moonserve profile --serving`.

Sends prompts that nobody has sent before, alone and beside others, and notes what came when; how long a prompt waited,
loaded and computed is the prefill worker's own report, as the conductor explains it. Its rule: runs of one shape lie
far apart and what is compared is measured in turn, so that a busy neighbour disturbs some of each and not all of one.
Makes no formula of it: that is `terms`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deploy.profile.bursts import Answered, Burst, Observations, PromptRun, StepRun
from protocol.errors import ConfigError
from protocol.timeline import Timeline
from traces.client import ModelFacts, Outcome, StreamClient
from traces.simulator.spec import CROWDED_BATCH

FIRST_TOKEN_ID = 16  # those before are special in most vocabularies
_OUTPUT_TOKENS = 12  # of a prompt alone: enough for a step time beside the handoff
_STEADY_TOKENS = 64  # of each stream of a batch
_BESIDE_PROMPT = 1024
_BESIDE_STREAMS = (1, CROWDED_BATCH)  # of the batches that prompts are computed beside
_BESIDE_CONTEXT = 256
_BESIDE_S = 2.0  # that a batch lasts at least, alone: several prompts are computed beside it
_BURST = 8  # prompts at one moment
_BURSTS = 5  # with answers, between the others
_PUTS_S = 1.0  # for putting what a burst has computed into stores
_SPREAD = (4 / 15, 8 / 15, 16 / 15, 32 / 15)  # of their prompts' lengths; the mean is 1
_REPORTED_WITHIN_S = 2.0
_ENOUGH_SHAPES = 4  # for three coefficients; measured however long they take
_TERMS = ("queue_s", "transfer_s", "prefill_s")  # of a prefill worker's report, as explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Shapes to time. Those that do not fit the model are left out."""

    prompt_tokens: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096, 7168)
    cached_shares: tuple[float, ...] = (0.5,)  # of a prompt that was sent before
    batches: tuple[int, ...] = (1, 4, 16, 32)
    contexts: tuple[int, ...] = (64, 512, 1536)
    load_prompt_tokens: int = 512  # of the load that it is for, on average, and of its answers
    load_answer_tokens: int = 64
    max_pool_tokens: int = 40_000  # of all streams together, or they push each other out
    runs: int = 3


class Probe:
    """Measures through one client. Every prompt is new to the cluster, or as cached as it is meant to be."""

    def __init__(self, client: StreamClient, facts: ModelFacts, grid: Grid) -> None:
        """Raises ConfigError when the endpoint does not tell what its prompts may be."""
        if facts.vocab_size is None or facts.max_model_len is None:
            raise ConfigError("the endpoint's /v1/models tells no vocab_size and max_model_len")
        self._client = client
        self._model = facts.name
        self._vocab_size = facts.vocab_size
        self._longest = facts.max_model_len
        self._grid = grid
        self._random = np.random.default_rng(0)

    async def observe(self, num_prefill: int, budget_s: float) -> Observations:
        """Takes about `budget_s` seconds, more where the first shapes do."""
        for num_tokens in (16, 256, 256):  # connections, first touches of memory
            await self._one(self._fresh(num_tokens))
        ends_at = time.monotonic() + budget_s
        prompts = await self._prompts(_after(0.5, ends_at))
        steps = await self._steps(_after(0.5, ends_at))
        step_s = min((run.seconds for run in steps), default=0.0)
        beside_prompts, bursts = await self._beside(num_prefill, step_s, ends_at)
        return Observations(prompts=prompts, steps=steps, beside_prompts=beside_prompts, bursts=bursts)

    # -- prompts alone

    async def _prompts(self, deadline: float) -> list[PromptRun]:
        """Shortest first, as many shapes as one run has time for."""
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
        """A new prompt, then prompts that begin like it."""
        first = self._fresh(num_tokens)
        kept = [int(num_tokens * share) for share in self._grid.cached_shares]
        later = [first[:count] + self._fresh(num_tokens - count) for count in kept]
        return [await self._one(prompt) for prompt in (first, *later)]

    async def _one(self, prompt: Sequence[int], num_others: int = 0, *, decodes_beside: bool = False) -> PromptRun:
        outcome = await self._complete(prompt, _OUTPUT_TOKENS)
        run = await self._prompt_run(outcome, len(prompt), num_others)
        return replace(run, decodes_beside=decodes_beside)

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
            decodes_beside=False,
            ttft_s=timeline.ttft_s,
            placed_s=timeline.ttft_s - float(found["ttft_s"]),
            queue_s=queue_s,
            load_s=load_s,
            compute_s=compute_s,
            handoff_s=gaps[0] - float(np.median(gaps[1:])) if len(gaps) > 2 else None,
        )

    async def _burst(self, num_prefill: int) -> list[Answered]:
        """Prompts that are decoded while those behind them are computed."""
        answer = min(self._grid.load_answer_tokens, self._longest // 2)
        mean = self._grid.load_prompt_tokens
        lengths = [min(round(mean * share) + 1, self._longest - answer) for share in _SPREAD]
        prompts = [self._fresh(lengths[number % len(lengths)]) for number in range(_BURST * num_prefill)]
        outcomes = await asyncio.gather(*(self._complete(each, answer) for each in prompts))
        return [
            Answered(
                prompt=await self._prompt_run(outcome, len(prompt), 0),
                sent_at=_timeline(outcome).arrived_at,
                token_at=_timeline(outcome).token_at,
            )
            for outcome, prompt in zip(outcomes, prompts, strict=True)
        ]

    async def _explained(self, outcome: Outcome) -> Mapping[str, Any]:
        """What the conductor knows of it, its machine as `prefill`. Reports reach it beside the tokens, so that they
        may come after the last one. Raises ConfigError where nobody explains."""
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
        """Fewest tokens first, over and over until the time is up."""
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
        """Their prompts are computed beforehand, so that all begin to decode at about the same time."""
        prompts = [self._fresh(context) for _ in range(batch)]
        for prompt in prompts:
            await self._complete(prompt, 1)
        outcomes = await asyncio.gather(*(self._complete(p, _STEADY_TOKENS) for p in prompts))
        timelines = [_timeline(outcome) for outcome in outcomes]
        begin = max(timeline.token_at[0] for timeline in timelines)
        end = min(timeline.token_at[-1] for timeline in timelines)
        return steps_between(timelines, context, begin, end)

    # -- side by side

    async def _beside(self, num_prefill: int, step_s: float, deadline: float) -> tuple[list[PromptRun], list[Burst]]:
        """In turn: one prompt, several at once, both beside a batch, and bursts with answers."""
        prompts: list[PromptRun] = []
        bursts: list[Burst] = []
        while not bursts or time.monotonic() < deadline:
            for width in range(1, num_prefill + 1):
                prompts += _apart(await self._at_once(width, width - 1), width)
            for width, streams in itertools.product(range(1, num_prefill + 1), _BESIDE_STREAMS):
                prompts += await self._beside_batch(width, streams, step_s)
            bursts += [await self._burst(num_prefill) for _ in range(_BURSTS)]
            await asyncio.sleep(_PUTS_S)
        return prompts, bursts

    async def _at_once(self, width: int, num_others: int, *, decodes_beside: bool = False) -> list[PromptRun]:
        length = min(_BESIDE_PROMPT, self._longest - _OUTPUT_TOKENS)
        fresh = [self._fresh(length) for _ in range(width)]
        runs = (self._one(each, num_others, decodes_beside=decodes_beside) for each in fresh)
        return list(await asyncio.gather(*runs))

    async def _beside_batch(self, width: int, num_streams: int, step_s: float) -> list[PromptRun]:
        """`width` prompts, as often as a batch lasts, that were computed wholly beside it. `step_s`: of a short one."""
        streams = [self._fresh(_BESIDE_CONTEXT) for _ in range(num_streams)]
        for prompt in streams:
            await self._complete(prompt, 1)
        wanted = int(_BESIDE_S / step_s) if step_s > 0.0 else 0
        length = min(self._longest - _BESIDE_CONTEXT, max(wanted, 8 * _STEADY_TOKENS))
        tasks = [asyncio.create_task(self._complete(p, length)) for p in streams]
        await asyncio.sleep(0.2)
        found: list[tuple[float, list[PromptRun]]] = []  # with their end
        while not any(task.done() for task in tasks):
            runs = await self._at_once(width, width, decodes_beside=True)
            found.append((time.monotonic(), runs))
            await asyncio.sleep(0.1)
        timelines = [_timeline(outcome) for outcome in await asyncio.gather(*tasks)]
        end = min(timeline.token_at[-1] for timeline in timelines)
        return [run for ended, runs in found if ended <= end for run in _apart(runs, width)]

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
    """When so much of the time that is left will have passed."""
    now = time.monotonic()
    return now + share * max(ends_at - now, 0.0)


def _timeline(outcome: Outcome) -> Timeline:
    assert outcome.timeline is not None, "it succeeded"
    return outcome.timeline


def steps_between(timelines: Sequence[Timeline], context: int, begin: float, end: float) -> list[StepRun]:
    """The steps of streams that all decode alone from `begin` to `end`, whose prompts had `context` tokens; nothing for
    less than three, nor where all tokens came at one instant. A step takes the mean gap: tokens that reach the client
    together are steps all the same, and who waits for a processor is slower by that."""
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


def _apart(found: list[PromptRun], width: int) -> list[PromptRun]:
    """None of them where some waited for each other at one machine."""
    return found if len({run.machine for run in found}) == width else []
