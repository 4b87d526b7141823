"""`python -m benchmarks.worker.shared_cores`: what workers gain that compute on each other's idle cores.

Two clusters of one prefill and one decode worker, `--lend-cores on` and `off`, run at once on all cores of this machine
and are measured one at a time, in turns, with a Llama of 110M random weights in bfloat16: prompts that find
an idle cluster, then eight clients at once. Prints medians over the rounds. Every side must give the same tokens.

Bars for on: TTFT of a single prompt of 512 tokens at most 0.6 of off; p99 of the gaps of eight streams at most 1.05.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.random_model import write
from benchmarks.engine.shapes import SMALL
from benchmarks.harness.measure import interleaved, latencies_ms, median, medians, random_prompts, table, write_json
from moonserve.deploy.launcher.local_cluster import running_cluster
from moonserve.models import demo_model_path
from moonserve.traces.client import StreamClient

SIDES = ("off", "on")
OUTPUT_TOKENS = 64
IDLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    prompt_tokens: int
    clients: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens} tokens, {self.clients} at once"


ALONE, BUSY = Load(512, 1), Load(512, 8)
LOADS = (Load(64, 1), ALONE, Load(2048, 1), BUSY)
BARS = ((ALONE, "ttft_p50_ms", 0.6), (BUSY, "tbt_p99_ms", 1.05))


async def ask(url: str, load: Load, number: int) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Returns the latencies and the tokens of three streams per client."""
    prompts = random_prompts(3 * load.clients, load.prompt_tokens, 4000, f"shared cores {load} {number}")
    free = asyncio.Semaphore(load.clients)
    extra = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    async with StreamClient(url) as client:
        model = (await client.model(None)).name

        async def one(prompt: list[int]) -> Any:
            async with free:
                await asyncio.sleep(IDLE_S if load.clients == 1 else 0.0)
                return await client.complete(model, prompt, max_tokens=OUTPUT_TOKENS, extra=extra)

        outcomes = await asyncio.gather(*map(one, prompts))
    failed = [outcome.error for outcome in outcomes if outcome.error or outcome.timeline is None]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return latencies_ms([each.timeline for each in outcomes]), [tuple(each.token_ids) for each in outcomes]


def measure(urls: Mapping[str, str], rounds: int) -> dict[str, Any]:
    results: dict[str, dict[str, list[dict[str, float]]]] = {str(load): defaultdict(list) for load in LOADS}
    tokens: dict[tuple[Load, int], list[tuple[int, ...]]] = {}
    different: list[str] = []
    for side, load in interleaved(SIDES, LOADS, rounds + 1):
        number = len(results[str(load)][side])
        latencies, own = asyncio.run(ask(urls[side], load, number))
        results[str(load)][side].append(latencies)
        if tokens.setdefault((load, number), own) != own:
            different.append(f"{side}: {load}")
    warm = {load: {side: found[1:] for side, found in sides.items()} for load, sides in results.items()}
    return {"loads": warm, "different": different}


def ratio(result: Mapping[str, Any], load: Load, name: str) -> float:
    sides = result["loads"][str(load)]
    return median([on[name] / off[name] for on, off in zip(sides["on"], sides["off"], strict=True)])


def report(result: Mapping[str, Any]) -> int:
    """Prints the table and the bars. Returns the exit code."""
    names = ("ttft_p50_ms", "tbt_p50_ms", "tbt_p99_ms")
    rows = []
    for load in LOADS:
        off, on = (medians(result["loads"][str(load)][side]) for side in SIDES)
        rows.append([load, *(f"{off[n]:.1f} → {on[n]:.1f} ({ratio(result, load, n):.2f})" for n in names)])
    print(table(["prompts, clients", "TTFT p50, ms", "gap p50, ms", "gap p99, ms"], rows))
    missed = [f"{name}, {load}: above {bar}" for load, name, bar in BARS if ratio(result, load, name) > bar]
    print(*missed, *(f"other tokens: {each}" for each in result["different"]), sep="\n")
    return int(bool(missed or result["different"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a claim")
    parser.add_argument("--output", type=Path, default=Path("out/shared-cores.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        demo = json.loads((demo_model_path() / "config.json").read_text())
        write(model, SMALL | {"vocab_size": demo["vocab_size"]})
        for file in demo_model_path().glob("tokenizer*"):
            shutil.copy(file, model)
        urls = {
            side: stack.enter_context(
                running_cluster(
                    model,
                    *("--lend-cores", side, "--store-nodes", "0"),
                    log_dir=Path(folder) / side,
                    environ={"MOONSERVE_CLUSTER_TOKEN": os.urandom(8).hex()},
                )
            ).url
            for side in SIDES
        }
        result = measure(urls, arguments.rounds)
    write_json(arguments.output, result)
    return report(result)


if __name__ == "__main__":
    sys.exit(main())
