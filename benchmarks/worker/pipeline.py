"""Measures the gain of a two-stage prefill pipeline on two cores: `python -m benchmarks.worker.pipeline`.

Compares the TTFT of one prefill worker on one core with that of a group of two stages on a core each. It uses the
workers' own library: the follower is a separate process, and hidden states go over the transfer engine. Both take
turns. As many chunks of a prompt are in flight as there are stages. Bars for the ratio pipeline ÷ one worker: 0.62 for
8,192 tokens, 1.05 for short prompts.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.engine.shapes import DEMO_FOLDER, SMALL, prompt_tokens
from benchmarks.harness.generate import greedy_slice
from benchmarks.worker.timeline import Span, SpanRecorder, draw_stages
from moonserve.engine.model.batch import Sampled
from moonserve.engine.replica import Replica, load_replica
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.decisions.events import SlicePlan
from moonserve.prefill_worker.decisions.steps import pipeline_chunk_tokens
from moonserve.prefill_worker.kv_writes import KvSender
from moonserve.prefill_worker.pipeline_follower import stage_memory
from moonserve.prefill_worker.pipeline_leader import PipelineGroup, start_followers
from moonserve.prefill_worker.pipeline_stage import StageExecutor
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.transfer import TransferEngine
from moonserve.transfer.config import TransferTimeout

TOKEN = "benchmark"
BLOCK_SIZE = 32
LONGEST = 8192
SHORT = (64, 128, 256, 512)


class Contestant:
    """A single prefill worker, or a group of stages."""

    def __init__(self, stage: StageExecutor | PipelineGroup, notes: Sequence[SpanRecorder], cores: set[int]) -> None:
        """`notes`: one per stage."""
        self._stage = stage
        self._num_stages = len(notes)
        self._cores = cores
        self.notes = notes

    async def prefill(self, prompt: Sequence[int], chunk: int) -> tuple[float, Sampled]:
        """Computes a prompt in chunks; returns the seconds to the first token, and the token."""
        os.sched_setaffinity(0, self._cores)
        under_way: deque[asyncio.Task[list[Sampled | None]]] = deque()
        sampled: list[Sampled | None] = []
        for each in self.notes:
            each.spans.clear()
        began = time.perf_counter()
        chunk = min(chunk, pipeline_chunk_tokens(len(prompt), self._num_stages))
        for start in range(0, len(prompt), chunk):
            if len(under_way) == self._num_stages:
                sampled = await under_way.popleft()
            plan = _plan(prompt, start, min(start + chunk, len(prompt)))
            under_way.append(asyncio.create_task(self._step(plan)))
        while under_way:
            sampled = await under_way.popleft()
        token = sampled[0]
        assert token is not None, "the last chunk samples"
        return time.perf_counter() - began, token

    async def _step(self, plan: SlicePlan) -> list[Sampled | None]:
        return await self._stage.begin([plan]).compute()


def _plan(prompt: Sequence[int], start: int, end: int) -> SlicePlan:
    is_last = end == len(prompt)
    complete = range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE) if is_last else end // BLOCK_SIZE)
    return SlicePlan(
        slice=greedy_slice("prompt", prompt, start, end, tuple(range(-(-len(prompt) // BLOCK_SIZE)))),
        landing=None,
        send_from=start,
        complete=tuple(complete),
    )


def _config(folder: Path, arguments: argparse.Namespace, size: int) -> PrefillConfig:
    return PrefillConfig(
        instance_id=f"pipeline-of-{size}",
        cluster_token=TOKEN,
        model=str(folder),
        dtype=arguments.dtype,
        load_format="dummy" if arguments.model == "110M" else "auto",
        block_size=BLOCK_SIZE,
        kv_cache_memory=512 << 20,
        max_num_batched_tokens=max(arguments.chunks),
        pipeline_parallel_size=size,
    )


@contextlib.asynccontextmanager
async def _alone(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Contestant]:
    config = _config(folder, arguments, 1)
    os.sched_setaffinity(0, {0})  # inherited by the engine's thread
    with TransferEngine(cluster_token=TOKEN) as transfer:
        replica, segment = await load_replica(config, transfer.allocate, Lifecycle(None))
        submit = KvSender(transfer, TransferTimeout()).submit
        with contextlib.closing(replica.thread):
            stage = StageExecutor(replica.thread, stage_memory(replica, segment), submit)
            notes = SpanRecorder()
            notes.watch_engine(replica.thread.engine)
            yield Contestant(stage, [notes], {0})


@contextlib.asynccontextmanager
async def _group(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Contestant]:
    config = _config(folder, arguments, 2)
    replica: Replica
    os.sched_setaffinity(0, {1})  # inherited by the follower
    async with start_followers(config) as processes:
        os.sched_setaffinity(0, {0})
        with TransferEngine(cluster_token=TOKEN) as transfer:
            replica, segment = await load_replica(config, transfer.allocate, Lifecycle(None), num_stages=2)
            with contextlib.closing(replica.thread):
                group = await processes.join(replica, transfer, segment)
                first, second = SpanRecorder(), SpanRecorder()
                first.watch_engine(replica.thread.engine)
                second.watch_follower(group.followers[0])
                yield Contestant(group, [first, second], {0})


async def measure(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = DEMO_FOLDER if arguments.model == "demo" else Path(temporary)
        if arguments.model == "110M":
            (folder / "config.json").write_text(json.dumps(SMALL))
        async with _alone(folder, arguments) as alone, _group(folder, arguments) as group:
            for chunk in arguments.chunks:
                for length in arguments.lengths:
                    await _compare(alone, group, length, chunk, arguments.rounds)
            if arguments.picture is not None:
                [one], [first, second] = alone.notes, group.notes
                title = f"{arguments.lengths[-1]} tokens in chunks of {arguments.chunks[-1]}"
                rows: list[tuple[str, Sequence[Span]]] = [("one worker", one.spans), ("", ())]
                rows += [("stage 0", first.spans), ("stage 1", second.spans)]
                draw_stages(arguments.picture, title, rows)


async def _compare(alone: Contestant, group: Contestant, length: int, chunk: int, rounds: int) -> None:
    prompt = prompt_tokens(length, length, 1000)
    times: tuple[list[float], list[float]] = ([], [])
    tokens: set[int] = set()
    for number in range(rounds + 1):
        for contestant, own in zip((alone, group), times, strict=True):
            seconds, token = await contestant.prefill(prompt, chunk)
            tokens.add(token.token_id)
            if number:  # the first round warms up
                own.append(seconds)
    one, two = (median(own) for own in times)
    ratios = sorted(b / a for a, b in zip(*times, strict=True))
    print(
        f"{length:6} tokens, chunks of {chunk:4}: 1 worker {one * 1e3:8.1f} ms, 2 stages {two * 1e3:8.1f} ms, "
        f"ratio {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        f"{'' if len(tokens) == 1 else '  TOKENS DIFFER'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker.pipeline")
    parser.add_argument("--model", default="110M", choices=("110M", "demo"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--lengths", default=[*SHORT, LONGEST], type=_counts)
    parser.add_argument("--chunks", default=[512], type=_counts)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--picture", type=Path, help="SVG of the last comparison's chunks")
    asyncio.run(measure(parser.parse_args()))


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


if __name__ == "__main__":
    main()
