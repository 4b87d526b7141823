"""`make bench-vllm`: disaggregated vLLM on two cores, by moonserve and by NIXL, in turns in one run on one machine.

1. TTFT, gaps between tokens and throughput of a 110M Llama (bfloat16, random weights) at several concurrencies.
   Claims: with `--engine vllm`, TTFT p50 at most 0.9 and throughput at least 1.0 times those of vLLM 1P1D with NIXL;
   with the connector alone, not worse than with NIXL. Prompts never repeat, so no cache helps. NIXL's progress threads
   take a core from each server, so NIXL is measured also with rests between their polls, and the claims are about that.
2. The handoff of 4,000-token prompts: from the decode server's call to its first token, less one step.
   Claim: bytes per second at least those of NIXL with rests. The bytes are equal, so their ratio is that of the times.
3. The second visit of a 4,000-token prompt through the store, at another server and after that server's restart.
   Claims: TTFT at most 0.3 times that of the first visit, and at most that with LMCache's server, whose hit ratio is
   equal.
4. Requests at rising rates, whoever has answered, beside one vLLM on both cores (`rates`).
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks.engine.shapes import SMALL
from benchmarks.harness.measure import (
    latencies_ms,
    median,
    medians,
    random_prompts,
    report_progress,
    table,
    total_throughput,
    write_json,
)
from benchmarks.serving.vllm.deployments import (
    MOONSERVE_CONNECTOR,
    NIXL_CONNECTOR,
    RESTING_NIXL,
    ROOT,
    VLLM_FLAGS,
    Deployment,
    Disaggregated,
    disaggregated,
    moonserve_cluster,
    vllm_alone,
)
from benchmarks.serving.vllm.rates import RATES, at_rising_rates, draw_chart, rates_table
from benchmarks.serving.vllm.visits import LONG_PROMPT, second_visits, visits_table
from moonserve.protocol.latency import Timeline

SPINNING = "vLLM 1P1D, NIXL"
REFERENCE = "vLLM 1P1D, NIXL that rests"
CONNECTOR = "vLLM 1P1D, moonserve's connector"
_PROMPT, _OUTPUT = 512, 64


def all_deployments(model: Path, folder: Path) -> Iterator[Deployment]:
    """Starts one after another."""
    yield vllm_alone(model, folder)
    yield disaggregated(SPINNING, model, folder, NIXL_CONNECTOR)
    yield disaggregated(REFERENCE, model, folder, NIXL_CONNECTOR, RESTING_NIXL)
    yield disaggregated(CONNECTOR, model, folder, MOONSERVE_CONNECTOR)
    yield moonserve_cluster("moonserve, vLLM", model, folder, "--engine", "vllm", *VLLM_FLAGS)
    yield moonserve_cluster("moonserve, own engine", model, folder)


async def measure(deployment: Deployment, concurrency: int, seed: str) -> dict[str, float]:
    """Returns the figures of `concurrency` clients that each send one prompt after another."""
    per_client = {1: 5, 8: 2}.get(concurrency, 1)
    prompts = random_prompts(concurrency * per_client, _PROMPT, SMALL["vocab_size"], seed)
    timelines: list[Timeline] = []

    async def client(number: int) -> None:
        async with deployment.client() as stream:
            for prompt in prompts[number::concurrency]:
                outcome = await deployment.complete(stream, prompt, _OUTPUT)
                if outcome.timeline is None or len(outcome.timeline.token_at) < _OUTPUT:
                    raise RuntimeError(f"{deployment.name}: {outcome.error or outcome}")
                timelines.append(outcome.timeline)

    await asyncio.gather(*(client(number) for number in range(concurrency)))
    return {**latencies_ms(timelines), "tokens_per_s": total_throughput(timelines)}


def serving(model: Path, folder: Path, concurrencies: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Measures all deployments in turns. Returns medians by "deployment, concurrency"."""
    deployments: list[Deployment] = []
    results: dict[str, list[dict[str, float]]] = {}
    try:
        for deployment in all_deployments(model, folder):
            deployments.append(deployment)
            deployment.wait_until_serving()
            asyncio.run(measure(deployment, 2, f"warm up {deployment.name}"))
            deployment.pause()
        for number in range(rounds):
            for concurrency in concurrencies:
                for deployment in deployments:
                    report_progress(f"round {number + 1}, {concurrency} at once: {deployment.name}")
                    deployment.resume()
                    row = asyncio.run(measure(deployment, concurrency, f"{number} {concurrency} {deployment.name}"))
                    deployment.pause()
                    results.setdefault(f"{deployment.name}, {concurrency}", []).append(row)
    finally:
        for deployment in deployments:
            deployment.close()
    return {name: medians(rows) for name, rows in results.items()}


CONDITIONAL = (
    *("--conditional-disaggregation", "on", "--role-switching", "off"),
    *("--admission", "none", "--ttft-slo", "1", "--tbt-slo", "0.1"),
)


def rising_rates(model: Path, folder: Path, rounds: int, seconds: float) -> dict[str, dict[float, dict[str, float]]]:
    deployments: list[Deployment] = []
    try:
        for deployment in (
            vllm_alone(model, folder),
            disaggregated(REFERENCE, model, folder, NIXL_CONNECTOR, RESTING_NIXL),
            moonserve_cluster("moonserve", model, folder),
            moonserve_cluster("moonserve, decode worker prefills too", model, folder, *CONDITIONAL),
        ):
            deployments.append(deployment)
            deployment.wait_until_serving()
            asyncio.run(measure(deployment, 2, f"warm up {deployment.name}"))
            deployment.pause()
        return at_rising_rates(deployments, RATES, rounds, seconds)
    finally:
        for deployment in deployments:
            deployment.close()


def serving_table(results: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, row in results.items():
        deployment, _, concurrency = name.rpartition(", ")
        peer = results[f"{REFERENCE}, {concurrency}"]
        rows.append(
            [
                deployment,
                concurrency,
                *(f"{row[each]:.1f}" for each in ("ttft_p50_ms", "ttft_p99_ms", "tbt_p50_ms", "tokens_per_s")),
                f"{row['ttft_p50_ms'] / peer['ttft_p50_ms']:.2f}",
                f"{row['tokens_per_s'] / peer['tokens_per_s']:.2f}",
            ]
        )
    headers = [
        "deployment",
        "at once",
        "TTFT p50 ms",
        "p99",
        "TBT p50 ms",
        "tokens/s",
        "TTFT ÷ NIXL",
        "tokens/s ÷ NIXL",
    ]
    return table(headers, rows)


async def _handoff_ms(deployment: Disaggregated, prompt: Sequence[int]) -> float:
    async with deployment.client() as client:
        outcome = await deployment.decode(client, prompt, 8)
    if outcome.timeline is None or len(outcome.timeline.token_at) < 8:
        raise RuntimeError(f"{deployment.name}: {outcome.error}")
    gaps = [b - a for a, b in itertools.pairwise(outcome.timeline.token_at)]
    return (outcome.timeline.ttft_s - median(gaps)) * 1000


def handoffs(model: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Returns the median time in ms of long prompts' handoffs."""
    deployments: list[Disaggregated] = []
    times: dict[str, list[float]] = {}
    try:
        for name, transfer, imports in (
            (REFERENCE, NIXL_CONNECTOR, RESTING_NIXL),
            (CONNECTOR, MOONSERVE_CONNECTOR, ROOT),
        ):
            deployments.append(disaggregated(name, model, folder, transfer, imports))
            deployments[-1].wait_until_serving()
        prompts = random_prompts((rounds + 1) * len(deployments), LONG_PROMPT, SMALL["vocab_size"], "handoffs")
        for number, prompt in enumerate(prompts):
            deployment = deployments[number % len(deployments)]
            report_progress(f"handoff {number + 1}: {deployment.name}")
            elapsed_ms = asyncio.run(_handoff_ms(deployment, prompt))
            if number >= len(deployments):  # the first ones connect
                times.setdefault(deployment.name, []).append(elapsed_ms)
    finally:
        for deployment in deployments:
            deployment.close()
    return {name: median(values) for name, values in times.items()}


def _write_model(folder: Path) -> None:
    """Writes the 110M model, and a tokenizer whose tokens are the ids in decimal: prompts are lists of ids."""
    subprocess.run([sys.executable, "-m", "benchmarks.engine.random_model", str(folder), "110M"], check=True)
    tokenizer = Tokenizer(WordLevel({str(n): n for n in range(SMALL["vocab_size"])}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(SMALL["eos_token_id"])}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", choices=["serving", "handoffs", "visits", "rates"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window of rates")
    parser.add_argument("--chart", type=Path, help="an SVG file for the chart of rates")
    parser.add_argument("--out", type=Path, default=Path("out/bench-vllm.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        _write_model(model)
        report: dict[str, object] = {}
        if arguments.only in (None, "serving"):
            results = serving(model, folder, arguments.concurrency, arguments.rounds)
            report["serving"] = results
            print(serving_table(results))
        if arguments.only in (None, "handoffs"):
            times = handoffs(model, folder, arguments.rounds)
            report["handoffs"] = times
            rows = [[name, f"{ms:.0f}", f"{times[REFERENCE] / ms:.2f}"] for name, ms in times.items()]
            print(table([f"handoff of {LONG_PROMPT} tokens", "ms", "bytes/s ÷ NIXL (at least 1)"], rows))
        if arguments.only in (None, "visits"):
            visits = second_visits(model, folder, arguments.rounds)
            report["visits"] = visits
            print(visits_table(visits))
        if arguments.only in (None, "rates"):
            found = rising_rates(model, folder, arguments.rounds, arguments.seconds)
            report["rates"] = found
            print(rates_table(found))
            if arguments.chart is not None:
                draw_chart(found, arguments.chart)
        write_json(arguments.out, report)


if __name__ == "__main__":
    main()
