"""Measures the gain of two tensor-parallel ranks on two cores: `python -m benchmarks.engine.tensor_parallel`.

Three replicas, loaded as in worker processes, take turns: one thread, two threads, and two ranks with a thread each.
Figures are milliseconds per decode step for several batches and contexts, and prompt tokens per second in chunks of
512. They are medians of wall time, because a rank's processor time would not show its waits. A second table has the
mean time of a sum over two ranks through shared memory.
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from benchmarks.engine.shapes import DEMO_FOLDER, SMALL, prompt_tokens
from benchmarks.harness.generate import greedy_slice
from benchmarks.harness.measure import median, table, write_json
from moonserve.engine.config import ReplicaConfig
from moonserve.engine.engine import Engine
from moonserve.engine.replica import running_replica
from moonserve.engine.tensor_parallel import step_messages
from moonserve.engine.tensor_parallel.collectives import Collectives, CollectivesLibrary
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.machine import cache_folder
from moonserve.transfer import TransferEngine

BLOCK_SIZE = 32
CHUNK = 512
STEPS = 12  # decode steps per turn
DECODE = ((1, 512), (8, 512), (8, 2048))  # sequences, context
PREFILL = (512, 2048)
CONTESTANTS = {"1 thread": (1, 1), "2 threads": (1, 2), "2 ranks": (2, 2)}  # ranks, threads
SUMS = ((1, 768), (8, 768), (512, 768))


def _blocks(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def decode_ms(engine: Engine, batch: int, context: int) -> float:
    """Returns the milliseconds of one decode step."""
    num_blocks = -(-(context + 1) // BLOCK_SIZE)
    tokens = [prompt_tokens(n, context + 1, 1000) for n in range(batch)]
    rows = [
        greedy_slice(f"{n}", own, context, context + 1, _blocks(n * num_blocks, num_blocks), num_prompt_tokens=context)
        for n, own in enumerate(tokens)
    ]
    engine.execute(rows)
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.execute(rows)
    return (time.perf_counter() - began) / STEPS * 1e3


def prefill_rate(engine: Engine, length: int) -> float:
    """Computes a prompt in chunks; returns tokens per second."""
    prompt = prompt_tokens(0, length, 1000)
    blocks = _blocks(0, -(-length // BLOCK_SIZE))
    began = time.perf_counter()
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        engine.execute([greedy_slice("prompt", prompt, start, end, blocks)])
    return length / (time.perf_counter() - began)


def _turn(engine: Engine, threads: int) -> list[float]:
    torch.set_num_threads(threads)
    decode = [decode_ms(engine, *shape) for shape in DECODE]
    return decode + [prefill_rate(engine, length) for length in PREFILL]


@contextlib.asynccontextmanager
async def _engines(arguments: argparse.Namespace) -> AsyncIterator[dict[str, Engine]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = DEMO_FOLDER if arguments.model == "demo" else Path(temporary)
        if arguments.model == "110M":
            (folder / "config.json").write_text(json.dumps(SMALL))
        async with contextlib.AsyncExitStack() as stack:
            engines = {}
            for name, (ranks, threads) in CONTESTANTS.items():
                config = ReplicaConfig(
                    instance_id=f"of-{ranks}-ranks",
                    model=str(folder),
                    dtype=arguments.dtype,
                    load_format="dummy" if arguments.model == "110M" else "auto",
                    block_size=BLOCK_SIZE,
                    kv_cache_memory=1 << 29,
                    max_num_batched_tokens=CHUNK,
                    num_threads=threads,
                    tensor_parallel_size=ranks,
                )
                transfer = stack.enter_context(TransferEngine(cluster_token="benchmark"))
                replica, _ = await stack.enter_async_context(
                    running_replica(config, transfer.allocate, Lifecycle(None))
                )
                engines[name] = replica.thread.engine
            yield engines


async def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the medians of each contestant: decode shapes, then prefill lengths."""
    turns: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    async with _engines(arguments) as engines:
        for number in range(arguments.rounds + 1):
            for name, engine in engines.items():
                found = _turn(engine, CONTESTANTS[name][1] // CONTESTANTS[name][0])
                if number:  # the first round warms up
                    turns[name].append(found)
    return {name: [median(values) for values in zip(*own, strict=True)] for name, own in turns.items()}


# -- sums alone


def _sums(rank: int, ranks: Collectives, count: int, results: mmap.mmap | None) -> None:
    torch.set_num_threads(1)
    for place, shape in enumerate(SUMS):
        hidden, part = torch.zeros(shape), torch.ones(shape)
        for _ in range(20):
            ranks.all_reduce(hidden, part)
        began = time.perf_counter()
        for _ in range(count):
            ranks.all_reduce(hidden, part)
        if results is not None and rank == 0:
            spent = (time.perf_counter() - began) / count
            torch.frombuffer(results, dtype=torch.float64)[place] = spent * 1e6


def sum_us(count: int) -> list[float]:
    """Returns the mean microseconds of one sum over two ranks, by shape."""
    pair = step_messages.pair()
    results = mmap.mmap(-1, mmap.PAGESIZE)
    library = CollectivesLibrary(cache_folder(os.environ, Path.home()))
    memory = mmap.mmap(-1, library.memory_bytes(2))
    both = [Collectives(library, memory, rank=n, size=2, sockets=[pair[n]]) for n in (0, 1)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_sums, args=(n, both[n], count, results)) for n in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found: list[float] = torch.frombuffer(results, dtype=torch.float64)[: len(SUMS)].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.tensor_parallel")
    parser.add_argument("--model", default="110M", choices=("110M", "demo"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sums = {"shared memory": sum_us(200)}
    steps_found = asyncio.run(measure(arguments))
    heads = [f"B{batch} C{context}, ms" for batch, context in DECODE]
    heads += [f"prefill {length}, tokens/s" for length in PREFILL]
    rows = [
        [
            name,
            *(f"{value:.2f}" if place < len(DECODE) else f"{value:,.0f}" for place, value in enumerate(own)),
        ]
        for name, own in steps_found.items()
    ]
    print(table((f"{arguments.model}, {arguments.dtype}", *heads), rows) + "\n")
    shapes = [f"{rows} × {width}, µs" for rows, width in SUMS]
    print(
        table(
            ("a sum over 2 ranks", *shapes),
            [[n, *(f"{us:.1f}" for us in own)] for n, own in sums.items()],
        )
    )
    if arguments.json is not None:
        write_json(arguments.json, {"steps": steps_found, "sums_us": sums})


if __name__ == "__main__":
    main()
