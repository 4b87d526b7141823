"""`python -m benchmarks.serving.tenant_isolation`: tests if TTFT reveals to one tenant which prompts another tenant has
sent.

Takes three samples of 200 prompts each, in turn on an idle cluster: prompts that another tenant has sent before
(*foreign*), new prompts (*miss*), and prompts that the same tenant has sent before (*own*). Claims, by the
Mann-Whitney test on TTFT:
1. foreign and miss cannot be distinguished: p > 0.05;
2. own and miss can: p < 0.001, so that the experiment would detect a shared block.
If foreign and miss have the same distribution, one run in twenty still fails claim 1: that is the meaning of p.
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import median, table, write_json
from moonserve.deploy.launcher.local_cluster import running_cluster
from moonserve.traces.client import StreamClient

# The Mann-Whitney test of two samples for a common distribution (Ann. Math. Statist. 18, 1947).


def mann_whitney_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p by the normal approximation, corrected for ties and continuity; for 20 or more values."""
    n, m = len(a), len(b)
    if not n or not m:
        raise ValueError("both samples need values")
    ranks = _ranks([*a, *b])
    u = sum(ranks[:n]) - n * (n + 1) / 2
    total = n + m
    ties = sum(count**3 - count for count in Counter([*a, *b]).values())
    variance = n * m / 12 * ((total + 1) - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0  # all values are equal
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns ranks from 1; equal values get the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in order[first : last + 1]:
            ranks[place] = (first + last) / 2 + 1
        first = last + 1
    return ranks


PROMPT_TOKENS = 256
VOCAB = 4_000
KEYS = {"alice": "isolation-key-of-alice", "bob": "isolation-key-of-bob"}


class TtftSamples:
    """TTFT in ms and number of cached prompt tokens, by kind of prompt."""

    def __init__(self) -> None:
        self.ttft_ms: dict[str, list[float]] = {"foreign": [], "miss": [], "own": []}
        self.cached: dict[str, int] = dict.fromkeys(self.ttft_ms, 0)

    async def take(self, kind: str, client: StreamClient, model: str, prompt: list[int]) -> None:
        outcome = await client.complete(model, prompt, max_tokens=2)
        if outcome.timeline is None:
            raise RuntimeError(f"a request failed: {outcome.status} {outcome.error}")
        if kind in self.ttft_ms:
            self.ttft_ms[kind].append(1000 * outcome.timeline.ttft_s)
            self.cached[kind] += outcome.cached_tokens


async def measure(url: str, trials: int) -> TtftSamples:
    rng, samples = random.Random("isolation"), TtftSamples()
    async with (
        StreamClient(url, api_key=KEYS["alice"]) as alice,
        StreamClient(url, api_key=KEYS["bob"]) as bob,
    ):
        model = (await bob.model(None)).name
        for trial in range(-10, trials):  # the first ten are a warm-up
            kinds = ("foreign", "miss", "own") if trial >= 0 else ("", "", "")
            asked, fresh = ([rng.randrange(16, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(2))
            await samples.take("", alice, model, asked)
            pair = [(kinds[0], asked), (kinds[1], fresh)]
            rng.shuffle(pair)  # the first prompt may influence the second
            for kind, prompt in pair:
                await samples.take(kind, bob, model, prompt)
            await samples.take(kinds[2], bob, model, asked)
    return samples


def result_of(samples: TtftSamples) -> dict[str, Any]:
    times = samples.ttft_ms
    p_foreign = mann_whitney_p(times["foreign"], times["miss"])
    p_own = mann_whitney_p(times["own"], times["miss"])
    return {
        "trials": len(times["miss"]),
        "ttft_p50_ms": {kind: median(values) for kind, values in times.items()},
        "cached_tokens": samples.cached,
        "claims": {
            "foreign_is_as_a_miss": {"p": p_foreign, "bar": "> 0.05", "met": p_foreign > 0.05},
            "own_is_told_apart": {"p": p_own, "bar": "< 0.001", "met": p_own < 0.001},
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("out/isolation.json"))
    options = parser.parse_args()
    tenants = ",".join(f"{name}={key}" for name, key in KEYS.items())
    flags = ("--num-threads", "1", "--tenant-keys", tenants)
    with (
        tempfile.TemporaryDirectory() as log_dir,
        running_cluster(None, *flags, log_dir=Path(log_dir)) as cluster,
    ):
        result = result_of(asyncio.run(measure(cluster.url, options.trials)))
    rows = [[kind, result["ttft_p50_ms"][kind], result["cached_tokens"][kind]] for kind in ("miss", "foreign", "own")]
    print(table(["prompt", "TTFT p50 ms", "cached tokens"], rows))
    claims = [[name, c["p"], c["bar"], c["met"]] for name, c in result["claims"].items()]
    print(table(["claim", "p", "bar", "met"], claims))
    write_json(options.output, result)
    return 0 if all(claim["met"] for claim in result["claims"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
