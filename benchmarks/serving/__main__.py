"""`make bench`: compares the cluster with the bare engine and transformers `generate`, in one run on one machine.

Claims (medians over the rounds; each round measures every side, in turn):
1. added TTFT over the bare engine's prefill, 512-token prompt, idle cluster: at most 6 ms;
2. decode through the cluster at concurrency 8: at least 75 % of the bare engine's tokens/s;
3. more output tokens/s at concurrency 8 than `generate` at batch 8;
4. TTFT of a 512-token prompt with prefill and decode on one core each: below 187 ms.
For 1 and 4 each worker is pinned to its own core. For 2 and 3 each worker and the bare engine compute with one thread
that is not pinned; `generate` uses all cores. Prompts never repeat, so no cache helps.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop
from transformers import AutoModelForCausalLM

from benchmarks.harness.measure import (
    decode_throughput,
    latencies_ms,
    median,
    medians,
    random_prompts,
    table,
    total_throughput,
    write_json,
)
from moonserve.deploy.launcher.local_cluster import running_cluster
from moonserve.engine.engine import Engine
from moonserve.engine.model.batch import Slice
from moonserve.engine.model.config import load_model_config
from moonserve.models import demo_model_path
from moonserve.protocol.latency import Timeline
from moonserve.protocol.process.machine import cache_folder
from moonserve.protocol.request import RequestId, SamplingParams
from moonserve.traces.client import ModelInfo, StreamClient

# The two baselines of the serving benchmark: moonserve's engine alone in this process, and transformers `generate`.


class BareEngine:
    """The engine without a cluster: prefills, then decodes in one batch."""

    def __init__(self, model_path: Path, *, block_size: int, chunk: int, num_threads: int) -> None:
        config = load_model_config(model_path)
        layout = config.kv_layout(block_size, "bfloat16")
        self._block_size = block_size
        self._chunk = chunk
        self._num_threads = num_threads
        self._engine = Engine.load(
            model_path,
            config=config,
            layout=layout,
            num_blocks=2048,
            num_threads=num_threads,
            cache_folder=cache_folder(os.environ, Path.home()),
        )

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        """Prefills the prompts, which arrive at once, in turn, then decodes them together."""
        torch.set_num_threads(self._num_threads)
        slices = [self._slice(n, prompt, max_tokens) for n, prompt in enumerate(prompts)]
        arrived_at = time.monotonic()
        instants: list[list[float]] = [self._prefill(slice_) for slice_ in slices]
        for _ in range(max_tokens - 1):
            for slice_ in slices:
                slice_.start, slice_.end = slice_.end, slice_.end + 1
            self._execute(slices)
            now = time.monotonic()
            for at in instants:
                at.append(now)
        return [Timeline(arrived_at, tuple(at)) for at in instants]

    def _prefill(self, slice_: Slice) -> list[float]:
        length = len(slice_.token_ids)
        for start in range(0, length, self._chunk):
            slice_.start, slice_.end = start, min(start + self._chunk, length)
            slice_.samples = slice_.end == length
            self._execute([slice_])
        return [time.monotonic()]

    def _execute(self, slices: Sequence[Slice]) -> None:
        for slice_, sampled in zip(slices, self._engine.execute(slices), strict=True):
            if sampled is not None:
                assert isinstance(slice_.token_ids, list)
                slice_.token_ids.append(sampled.token_id)

    def _slice(self, number: int, prompt: Sequence[int], max_tokens: int) -> Slice:
        blocks = -(-(len(prompt) + max_tokens) // self._block_size)
        return Slice(
            request_id=RequestId(str(number)),
            token_ids=list(prompt),
            start=0,
            end=0,
            block_table=list(range(number * blocks, (number + 1) * blocks)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            num_prompt_tokens=len(prompt),
            samples=False,
        )


class TransformersGenerate:
    """Greedy `generate` of transformers on one batch of equally long prompts."""

    def __init__(self, model_path: Path, num_threads: int) -> None:
        self._num_threads = num_threads
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
        self._model.train(False)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        torch.set_num_threads(self._num_threads)
        clock = _StepClock()
        arrived_at = time.monotonic()
        with torch.inference_mode():
            self._model.generate(
                torch.tensor(list(prompts)),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        return [Timeline(arrived_at, tuple(clock.instants)) for _ in prompts]


class _StepClock:
    """A stopping criterion that never stops, and records the end of each step."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.instants.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


PROMPT_TOKENS = 512
# Bars by concurrency. At 8, all streams must decode at once for a while: the last one starts after seven prefills.
OUTPUT_TOKENS = {1: 256, 8: 768, 32: 64}
IDLE_REQUESTS = 10
IDLE_OUTPUT_TOKENS = 32
BLOCK_SIZE = 32
CHUNK = 512

BARS = {
    "added_ttft_ms": ("<=", 6.0),
    "decode_ratio_to_bare": (">=", 0.75),
    "throughput_ratio_to_generate": (">", 1.0),
    "ttft_512_ms": ("<", 187.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a claim")
    parser.add_argument("--output", type=Path, default=Path("out/serving.json"))
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as log_dir,
        running_cluster(None, "--num-threads", "1", log_dir=Path(log_dir)) as cluster,
    ):
        workers = _Workers(cluster.process.pid)
        result = uvloop.run(_measure(cluster.url, workers, arguments.rounds))
    print(_report(result))
    write_json(arguments.output, result)
    return 0 if all(claim["met"] for claim in result["claims"].values()) else 1


def _role(process: psutil.Process) -> str | None:
    """Returns the role in a worker's command line."""
    words = process.cmdline()
    return words[words.index("--role") + 1] if "--role" in words else None


class _Workers:
    """Processes of the workers; pins each to a core or releases all."""

    def __init__(self, launcher: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        children = psutil.Process(launcher).children()
        self._prefill = [c for c in children if _role(c) == "prefill"]
        self._decode = [c for c in children if _role(c) == "decode"]

    def pin(self) -> None:
        self._set(self._cores[:1], self._cores[-1:])

    def release(self) -> None:
        self._set(self._cores, self._cores)

    def _set(self, prefill: list[int], decode: list[int]) -> None:
        for processes, cores in ((self._prefill, prefill), (self._decode, decode)):
            for process in processes:
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, cores)


async def _measure(url: str, workers: _Workers, rounds: int) -> dict[str, Any]:
    model_path = demo_model_path()
    bare = BareEngine(model_path, block_size=BLOCK_SIZE, chunk=CHUNK, num_threads=1)
    generate = TransformersGenerate(model_path, num_threads=len(os.sched_getaffinity(0)))
    async with StreamClient(url) as client:
        facts = await client.model(None)
        sides: dict[str, list[dict[str, float]]] = {}
        for number in range(-1, rounds):  # the first round is a warm-up
            workers.pin()
            idle = await _idle_ttft(client, facts, bare, number)
            workers.release()
            figures = await _round(client, facts, bare, generate, number) | {"idle": idle}
            if number >= 0:
                for side, row in figures.items():
                    sides.setdefault(side, []).append(row)
    return _result(sides)


async def _idle_ttft(client: StreamClient, facts: ModelInfo, bare: BareEngine, number: int) -> dict[str, float]:
    """Measures one request at a time: each prompt through the cluster and through the bare engine."""
    assert facts.vocab_size is not None
    prompts = random_prompts(IDLE_REQUESTS, PROMPT_TOKENS, facts.vocab_size, f"idle {number}")
    cluster_ms, bare_ms = [], []
    for prompt in prompts:
        (timeline,) = await _cluster_run(client, facts.name, [prompt], IDLE_OUTPUT_TOKENS)
        cluster_ms.append(timeline.ttft_s * 1000)
        bare_ms.append(bare.run([prompt], 1)[0].ttft_s * 1000)
    added = [a - b for a, b in zip(cluster_ms, bare_ms, strict=True)]
    return {
        "ttft_p50_ms": median(cluster_ms),
        "bare_prefill_p50_ms": median(bare_ms),
        "added_p50_ms": median(added),
    }


async def _round(
    client: StreamClient,
    facts: ModelInfo,
    bare: BareEngine,
    generate: TransformersGenerate,
    number: int,
) -> dict[str, dict[str, float]]:
    assert facts.vocab_size is not None
    figures: dict[str, dict[str, float]] = {}
    for concurrency, output_tokens in OUTPUT_TOKENS.items():
        prompts = random_prompts(
            concurrency,
            PROMPT_TOKENS,
            facts.vocab_size,
            f"round {number} concurrency {concurrency}",
        )
        runs = {
            "cluster": await _cluster_run(client, facts.name, prompts, output_tokens),
            "bare engine": bare.run(prompts, output_tokens),
            "generate": generate.run(prompts, output_tokens),
        }
        figures |= {f"{side} {concurrency}": _figures(run) for side, run in runs.items()}
        if concurrency == 8:
            for side, run in runs.items():
                figures[f"{side} 8"]["decode_tokens_per_s"] = decode_throughput(run)
    return figures


async def _cluster_run(
    client: StreamClient,
    model: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
) -> list[Timeline]:
    outcomes = await asyncio.gather(*(client.complete(model, prompt, max_tokens=output_tokens) for prompt in prompts))
    timelines = []
    for outcome in outcomes:
        if outcome.timeline is None or outcome.error is not None:
            raise RuntimeError(f"a request failed: {outcome.status} {outcome.error}")
        timelines.append(outcome.timeline)
    return timelines


def _figures(timelines: Sequence[Timeline]) -> dict[str, float]:
    return {
        **latencies_ms(timelines),
        "output_tokens_per_s": total_throughput(timelines),
    }


def _result(sides: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    def ratio(figure: str, side: str, other: str) -> float:
        pairs = zip(sides[side], sides[other], strict=True)
        return median([a[figure] / b[figure] for a, b in pairs])

    measured = {
        "added_ttft_ms": median([row["added_p50_ms"] for row in sides["idle"]]),
        "decode_ratio_to_bare": ratio("decode_tokens_per_s", "cluster 8", "bare engine 8"),
        "throughput_ratio_to_generate": ratio("output_tokens_per_s", "cluster 8", "generate 8"),
        "ttft_512_ms": median([row["ttft_p50_ms"] for row in sides["idle"]]),
    }
    claims = {
        name: {"measured": value, "bar": "{} {}".format(*BARS[name]), "met": _met(name, value)}
        for name, value in measured.items()
    }
    medians_by_side = {side: medians(rows) for side, rows in sides.items()}
    return {"claims": claims, "medians": medians_by_side, "rounds": sides}


def _met(name: str, value: float) -> bool:
    sign, bar = BARS[name]
    return {"<=": value <= bar, ">=": value >= bar, ">": value > bar, "<": value < bar}[sign]


def _report(result: dict[str, Any]) -> str:
    columns = [
        "ttft_p50_ms",
        "ttft_p99_ms",
        "tbt_p50_ms",
        "tbt_p99_ms",
        "output_tokens_per_s",
    ]
    rows = [[side, *(row[name] for name in columns)] for side, row in result["medians"].items() if side != "idle"]
    claims = [
        [name, f"{c['measured']:.2f}", c["bar"], "yes" if c["met"] else "NO"] for name, c in result["claims"].items()
    ]
    return "\n\n".join(
        (
            table(["side and concurrency", *columns], rows),
            "Idle, one request at a time, a core each: "
            "TTFT {ttft_p50_ms:.1f} ms, bare prefill {bare_prefill_p50_ms:.1f} ms".format_map(
                result["medians"]["idle"]
            ),
            table(["claim", "measured", "bar", "met"], claims),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
