"""`python -m benchmarks.serving.speculative_decoding`: time between tokens with and without speculative decoding.

Clusters with `--speculative off`, `adaptive` and `on` run at once and are measured one at a time, in turns, with the
demo model and streams of one client or several. *Code*: each prompt is a piece of a file of this repository.
*Random*: each prompt is random tokens. Greedy output of the demo model soon repeats itself; drawn output does so less.
Prints the median of the requests' mean time per token, the longest gaps, the decode worker's processor time per
token, tokens and rows per step, and the ratios of both times to those of off, as medians over the rounds. On a busy
machine the first two mean little. Every side must give the same tokens, otherwise its row says so.

Bars, of `adaptive`, for a single greedy stream of code, and for a drawn one after random tokens:
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness.measure import interleaved, latencies_ms, median, medians, random_prompts, table, write_json
from moonserve.deploy.launcher.local_cluster import running_cluster
from moonserve.models import demo_model_path
from moonserve.protocol.latency import Timeline
from moonserve.traces.client import StreamClient

OFF, SIDES = "off", ("off", "adaptive", "on")
PROMPT_TOKENS, OUTPUT_TOKENS = 400, 128
VOCAB = 4_000  # ids below it are ordinary tokens of the demo model
PER_ROUND = 4  # prompts; a file of this repository each
FOLDERS = ("engine", "gateway", "kvstore", "transfer", "conductor", "prefill_worker")
DRAFTED, ACCEPTED = (f"moonserve_spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted"))
STEPS = 'moonserve_worker_events_total{event="steps"}'
COUNTED = ("process_cpu_seconds_total", DRAFTED, ACCEPTED, STEPS)
FLAGS = ("--num-threads", "1", "--store-nodes", "0", "--kv-cache-memory", "128MiB")


@dataclass(frozen=True, slots=True)
class Load:
    text: str  # code or random
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{self.text}, {how}, {self.concurrency} at once"


CODE, RANDOM = Load("code", 0.0, 1), Load("random", 0.8, 1)
LOADS = (CODE, Load("code", 0.0, 4), Load("code", 0.8, 1), RANDOM, Load("random", 0.8, 4))
BARS = {CODE: 0.7, RANDOM: 1.05}
__doc__ += "\n".join(f"{load}: at most {bar} of the time without." for load, bar in BARS.items())


class Prompts:
    """Prompts of both kinds; every round has new ones."""

    def __init__(self) -> None:
        root, tokenizer = Path(__file__).parents[2], Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
        files = [path for folder in FOLDERS for path in sorted((root / folder).glob("*/*.py"))]
        pieces = (tokenizer.encode(path.read_text()).ids[100 : 100 + PROMPT_TOKENS] for path in files)
        self._code = [piece for piece in pieces if len(piece) == PROMPT_TOKENS]

    def of(self, text: str, number: int) -> list[list[int]]:
        if text == "random":
            return random_prompts(PER_ROUND, PROMPT_TOKENS, VOCAB, f"speculative {number}")
        return [self._code[(number * PER_ROUND + at) % len(self._code)] for at in range(PER_ROUND)]


async def ask(url: str, prompts: Sequence[list[int]], load: Load) -> tuple[list[Timeline], list[tuple[int, ...]]]:
    """Returns the timelines and the tokens of one stream per prompt."""
    free = asyncio.Semaphore(load.concurrency)
    extra = {"temperature": load.temperature, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    async with StreamClient(url) as client:
        model = (await client.model(None)).name

        async def one(prompt: list[int]) -> tuple[Timeline, tuple[int, ...]]:
            async with free:
                outcome = await client.complete(model, prompt, max_tokens=OUTPUT_TOKENS, extra=extra)
            if outcome.timeline is None or outcome.error:
                raise RuntimeError(f"a request failed: {outcome.status} {outcome.error}")
            return outcome.timeline, tuple(outcome.token_ids)

        found = await asyncio.gather(*map(one, prompts))
    return [timeline for timeline, _ in found], [tokens for _, tokens in found]


def figures(timelines: Sequence[Timeline], used: Counter[str]) -> dict[str, float]:
    num_tokens = len(timelines) * (OUTPUT_TOKENS - 1)  # the prefill worker computes the first
    return {
        "tpot_ms": median([timeline.tpot_s * 1000 for timeline in timelines]),
        "tbt_p99_ms": latencies_ms(timelines)["tbt_p99_ms"],
        "cpu_ms": used["process_cpu_seconds_total"] * 1000 / num_tokens,
        "rows_per_step": (num_tokens - used[ACCEPTED] + used[DRAFTED]) / used[STEPS],
        "tokens_per_step": num_tokens / used[STEPS],
    }


def counted(url: str) -> Counter[str]:
    """Returns the decode worker's counters."""
    with urllib.request.urlopen(f"{url}/metrics/cluster") as reply:
        lines = reply.read().decode().splitlines()
    own = (
        line.replace('{process="decode-0"}', "").replace('process="decode-0",', "").rsplit(None, 1) for line in lines
    )
    return Counter({name: float(value) for name, value in own if name in COUNTED})


def measure(urls: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Returns the figures of every side and round by load, and the loads under which a side gave other tokens."""
    prompts = Prompts()
    results: dict[str, dict[str, list[dict[str, float]]]] = {str(load): defaultdict(list) for load in LOADS}
    tokens: dict[tuple[Load, int], list[tuple[int, ...]]] = {}
    different: list[str] = []
    for side, load in interleaved(list(urls), LOADS, rounds + 1):
        number = len(results[str(load)][side])
        before = counted(urls[side])
        timelines, own = asyncio.run(ask(urls[side], prompts.of(load.text, number), load))
        results[str(load)][side].append(figures(timelines, counted(urls[side]) - before))
        if tokens.setdefault((load, number), own) != own:
            different.append(f"{side}: {load}")
    warm = {load: {side: found[1:] for side, found in sides.items()} for load, sides in results.items()}
    return {"loads": warm, "different": different}


def ratio(sides: Mapping[str, Sequence[Mapping[str, float]]], side: str, name: str) -> float:
    return median([own[name] / without[name] for own, without in zip(sides[side], sides[OFF], strict=True)])


def report(result: Mapping[str, Any]) -> int:
    """Prints the table and the bars. Returns the exit code."""
    rows: list[list[Any]] = []
    for load, sides in result["loads"].items():
        for side, found in sides.items():
            own = medians(found)
            other = " (other tokens!)" if f"{side}: {load}" in result["different"] else ""
            ratios = [f"{ratio(sides, side, name):.2f}" for name in ("tpot_ms", "cpu_ms")]
            decimals = [f"{own[name]:.2f}" for name in ("cpu_ms", "tokens_per_step", "rows_per_step")]
            rows.append([load, side + other, own["tpot_ms"], own["tbt_p99_ms"], *decimals, *ratios])
    headers = ["ms per token", "p99 gap, ms", "CPU ms per token", "tokens", "rows per step", "of off", "CPU of off"]
    print(table(["streams", "--speculative", *headers], rows))
    bars = BARS.items() if "adaptive" in result["loads"][str(CODE)] else ()
    missed = [load for load, bar in bars if ratio(result["loads"][str(load)], "adaptive", "tpot_ms") > bar]
    for load in missed:
        print(f"above its bar: {load}")
    return int(bool(missed or result["different"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a claim")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--sides", nargs="+", default=("adaptive",), choices=SIDES)
    parser.add_argument("--output", type=Path, default=Path("out/speculative-decoding.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls = {
            side: stack.enter_context(
                running_cluster(
                    None,
                    *FLAGS,
                    "--dtype",
                    arguments.dtype,
                    "--speculative",
                    side,
                    log_dir=Path(folder) / side,
                    environ={"MOONSERVE_CLUSTER_TOKEN": os.urandom(8).hex()},
                )
            ).url
            for side in dict.fromkeys((OFF, *arguments.sides))
        }
        result = measure(urls, arguments.rounds)
    write_json(arguments.output, result)
    return report(result)


if __name__ == "__main__":
    sys.exit(main())
