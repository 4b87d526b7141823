"""vLLM's `AsyncLLM` as a worker uses it: start, generation, figures. The only module that calls the engine.

`AsyncLLM` runs in the worker's event loop; its engine core, which computes, is a process of vLLM's. Errors become those
of `protocol.errors`. Does not know gateways, workers or the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from moonserve.protocol.errors import InvalidRequest, MoonserveError, NoWorker
from moonserve.protocol.request import (
    FinishReason,
    Logprobs,
    PrefillReport,
    PromptLogprobs,
    Request,
    Token,
    finish_reason,
)
from moonserve.vllm.serving.kv_event_state import KvEventSource
from moonserve.vllm.serving.model_description import facts_of
from moonserve.vllm.serving.sampling import engine_parameters, prompt_logprobs, scheduling_priority, transfer_parameters
from moonserve.vllm.serving.service import EngineFigures
from moonserve.vllm.serving.state import Generate, Generated

SHUTDOWN_S = 4.0
"""Time for vLLM's processes to end, after which it kills them."""


class StepFigures(EngineFigures, StatLoggerBase):
    """Figures of one engine, updated after each of its steps."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        EngineFigures.__init__(self)
        self.num_running = 0
        self._num_ended_tokens = 0  # computed of the prompts that ended with the latest step
        self._prompts_from, self._prompts_until = 0.0, 0.0  # the time that they shared, on the engine's clock
        self._last_step_at: float | None = None  # while requests run

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after each step of the engine."""
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.num_hit_tokens += scheduler_stats.prefix_cache_stats.hits
            loaded = scheduler_stats.connector_prefix_cache_stats
            self.num_loaded_tokens += 0 if loaded is None else loaded.hits
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs
            self._num_ended_tokens = iteration_stats.prompt_token_stats.computed or self._num_ended_tokens
            self._count_step(iteration_stats)
        if not self.num_running:
            self._last_step_at = None

    def _count_step(self, stats: IterationStats) -> None:
        now, before = time.monotonic(), self._last_step_at
        self._last_step_at = now
        if before is not None:
            computed, made = stats.prompt_token_stats.computed, stats.num_generation_tokens
            self.log.add(before, now, self.num_running, computed, made, self.context_tokens(), 0.0)
        if before is not None and stats.num_generation_tokens and not stats.num_prompt_tokens:
            self.steps.num_steps += 1
            self.steps.seconds += now - before
            self.steps.sequences += stats.num_generation_tokens
            self.steps.context_tokens += self.context_tokens()

    def prompt_s(self, num_tokens: int, scheduled_at: float, ended_at: float) -> float:
        """Returns the share of a prompt that has just ended, `num_tokens` of which were computed, in the time since
        earlier ones ended: by its tokens among those that ended with the same step. Prompts share steps in vLLM; the
        sum of all shares is the time for which the engine computed prompts."""
        if ended_at != self._prompts_until:
            self._prompts_from, self._prompts_until = max(self._prompts_until, scheduled_at), ended_at
        return (ended_at - self._prompts_from) * num_tokens / max(num_tokens, self._num_ended_tokens)

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface."""


class VllmEngine:
    """A started engine."""

    def __init__(self, llm: AsyncLLM, figures: StepFigures, *, exact_draws: bool, by_priority: bool) -> None:
        config: VllmConfig = llm.vllm_config
        self.figures: EngineFigures = figures
        self._steps = figures
        self.facts = facts_of(config)
        self.kv_events = _kv_events(config)
        self._llm = llm
        self._exact_draws = exact_draws
        self._by_priority = by_priority
        self._has_connector = config.kv_transfer_config is not None

    async def died(self) -> None:
        """Waits for the end of the engine. Raises NoWorker."""
        assert self._llm.output_handler is not None, "it runs from the engine's start"
        await asyncio.wait({self._llm.output_handler})
        raise NoWorker("the engine has died; vLLM's log says why")

    async def generate(self, wanted: Generate, salt: str = "") -> AsyncGenerator[Generated, None]:
        """Implements `Engine.generate`."""
        request, is_prefill = wanted.request, wanted.is_prefill
        given = engine_parameters(request, max_new_tokens=1 if is_prefill else None, exact=self._exact_draws)
        params = transfer_parameters(request, is_prefill, wanted.kv_transfer_params) if self._has_connector else None
        if params is not None:
            given["extra_args"] = {**given.get("extra_args", {}), "kv_transfer_params": params}
        prompt = tokens_input(list(request.token_ids), cache_salt=salt or None)
        index, submitted_at = request.first_index, time.monotonic()
        try:
            sampling = VllmSamplingParams(output_kind=RequestOutputKind.DELTA, **given)
            priority = scheduling_priority(request.priority if self._by_priority else 0, wanted.place)
            outputs = self._llm.generate(prompt, sampling, request.request_id, priority=priority)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    tokens = _tokens(request, output, index, ends=output.finished and not is_prefill)
                    index += len(tokens)
                    found = output.kv_transfer_params
                    if tokens:
                        yield Generated(
                            request_id=request.request_id,
                            tokens=tokens,
                            report=self._report(request, output, submitted_at, is_prefill=is_prefill),
                            kv_transfer_params=json.dumps(found) if found else "",
                        )
        except MoonserveError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error), request=request.request_id) from error
        except EngineDeadError as error:
            raise NoWorker("this worker's engine has died", request=request.request_id) from error
        except Exception as error:  # vLLM wraps whatever went wrong with one request
            cause = error.__cause__ or error
            raise NoWorker(f"vLLM failed: {type(cause).__name__}: {cause}", request=request.request_id) from error

    def _report(
        self, request: Request, output: RequestOutput, submitted_at: float, *, is_prefill: bool
    ) -> PrefillReport:
        """`submitted_at`: on the clock of the engine's process, which is on this host. vLLM's own queueing time begins
        only after the step during which a request arrives."""
        times, num_cached = output.metrics, output.num_cached_tokens or 0
        queue_s = compute_s = 0.0
        if times is not None:
            compute_s = times.first_token_ts - times.scheduled_ts
            if is_prefill:
                num_computed = len(request.token_ids) - num_cached
                compute_s = self._steps.prompt_s(num_computed, times.scheduled_ts, times.first_token_ts)
            queue_s = times.first_token_ts - submitted_at - compute_s
        return PrefillReport(
            request_id=request.request_id,
            cached_tokens=num_cached,
            queue_s=max(0.0, queue_s),
            load_s=0.0,
            compute_s=max(0.0, compute_s),
            prompt_logprobs=_prompt_logprobs(request, output),
        )

    async def reset_prefix_cache(self) -> None:
        """Drops what was cached, such as prompts of measurements."""
        await self._llm.reset_prefix_cache()


def _kv_events(config: VllmConfig) -> KvEventSource | None:
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    return KvEventSource(endpoint=events.endpoint, replay=events.replay_endpoint, topic=events.topic)


def _tokens(request: Request, output: RequestOutput, index: int, *, ends: bool) -> tuple[Token, ...]:
    """Returns the tokens of an output, numbered from `index`. `ends`: the last one ends the request."""
    [made] = output.outputs
    if made.finish_reason in ("abort", "error"):
        raise NoWorker(f"vLLM ended the request: {made.finish_reason}", request=request.request_id)
    tokens = []
    for offset, token_id in enumerate(made.token_ids):
        reason = finish_reason(request.sampling, index + offset, token_id)
        if reason is None and ends and offset == len(made.token_ids) - 1:
            reason = FinishReason.LENGTH  # the model's context is full
        logprobs = None if made.logprobs is None else _logprobs(made.logprobs[offset], token_id, request)
        tokens.append(
            Token(
                request_id=request.request_id,
                index=index + offset,
                token_id=token_id,
                logprobs=logprobs,
                finish_reason=reason,
            )
        )
    return tuple(tokens)


def _logprobs(found: Mapping[int, Any], token_id: int, request: Request) -> Logprobs:
    best = sorted(found.items(), key=lambda item: item[1].rank)[: request.sampling.num_logprobs or 0]
    top = tuple((candidate, _finite(entry.logprob)) for candidate, entry in best)
    return Logprobs(_finite(found[token_id].logprob), top)


def _finite(logprob: float) -> float:
    """Returns a number that JSON has."""
    return logprob if math.isfinite(logprob) else -9999.0  # as vLLM's own server


def _prompt_logprobs(request: Request, output: RequestOutput) -> PromptLogprobs | None:
    if not request.scores_prompt or not output.prompt_logprobs:
        return None
    found = (each or {} for each in output.prompt_logprobs[1:])  # only the first token has none
    return prompt_logprobs(
        request, [{token_id: (_finite(e.logprob), e.rank) for token_id, e in each.items()} for each in found]
    )


# -- start and end


@contextlib.contextmanager
def running_engine(args: AsyncEngineArgs, *, exact_draws: bool) -> Iterator[VllmEngine]:
    """Starts an engine and ends it with the block. Must be called in the event loop's thread; blocks for seconds. By
    vLLM's scheduling policy "priority", clients' priorities precede the places that the conductor gave."""
    by_priority, args.scheduling_policy = args.scheduling_policy == "priority", "priority"
    made: list[StepFigures] = []

    def figures(config: VllmConfig, index: int = 0) -> StepFigures:
        made.append(StepFigures(config, index))
        return made[-1]

    with _group_ended_with_this_process():
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[figures])
        try:
            yield VllmEngine(llm, made[0], exact_draws=exact_draws, by_priority=by_priority)
        finally:
            llm.shutdown(timeout=SHUTDOWN_S)


@contextlib.contextmanager
def _group_ended_with_this_process() -> Iterator[None]:
    """Ends vLLM's processes if this one is killed within the block. They would keep their memory, since vLLM ends them
    only in an orderly shutdown. A shell waits for the end of a pipe that only this process holds, then kills its group,
    which this process leads."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    read_fd, write_fd = os.pipe()
    command = f"read line || kill -9 -{os.getpid()} 2>/dev/null"
    watch = subprocess.Popen(["/bin/sh", "-c", command], stdin=read_fd, start_new_session=True)
    os.close(read_fd)
    try:
        yield
    finally:
        watch.kill()
        watch.wait()
        os.close(write_fd)
