"""Requests that arrive at rising rates, whoever has answered: until which rate does each deployment keep its promises?

A request is in time if its first token comes within a second and its longest tenth of gaps is below 100 ms on average.
Arrivals are Poisson, equal for all deployments, which take turns; a window's requests end before the next one.
"""

import asyncio
import base64
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.shapes import SMALL
from benchmarks.harness.measure import latencies_ms, median, random_prompts, report_progress, table, total_throughput
from benchmarks.serving.vllm.deployments import Deployment
from moonserve.protocol.latency import Timeline
from moonserve.traces.plots import draw_image, label_axes, legend, line_style

RATES = (0.5, 1.0, 1.5, 2.0)
_PROMPT, _OUTPUT = 512, 64
_TTFT_SLO_S, _TBT_SLO_S = 1.0, 0.1
_MOST_TTFT_S = 4.0  # beyond this median, a deployment is not measured at higher rates

Row = dict[str, float]


async def measure(deployment: Deployment, rate: float, seconds: float, seed: str) -> Row:
    """Returns the figures of the requests that arrive within `seconds`, at `rate` requests/s on average."""
    draw = random.Random(f"{rate} {seed}")
    arrivals, at = [], draw.expovariate(rate)
    while at < seconds:
        arrivals.append(at)
        at += draw.expovariate(rate)
    prompts = random_prompts(len(arrivals), _PROMPT, SMALL["vocab_size"], f"{rate} {seed} {deployment.name}")
    timelines: list[Timeline] = []
    async with deployment.client() as client:

        async def request(after_s: float, prompt: Sequence[int]) -> None:
            await asyncio.sleep(after_s)
            outcome = await deployment.complete(client, prompt, _OUTPUT)
            if outcome.timeline is None or len(outcome.timeline.token_at) < _OUTPUT:
                raise RuntimeError(f"{deployment.name}: {outcome.error or outcome}")
            timelines.append(outcome.timeline)

        await asyncio.gather(*map(request, arrivals, prompts))
    in_time = [timeline.meets(ttft_slo_s=_TTFT_SLO_S, tbt_slo_s=_TBT_SLO_S) for timeline in timelines]
    shares = {"in_time": sum(in_time) / max(1, len(in_time)), "tokens_per_s": total_throughput(timelines)}
    return {**latencies_ms(timelines), **shares}


def at_rising_rates(
    deployments: Sequence[Deployment], rates: Sequence[float], rounds: int, seconds: float
) -> dict[str, dict[float, Row]]:
    """Measures running, paused deployments in turns. Returns the medians of each by rate."""
    found: dict[str, dict[float, Row]] = {deployment.name: {} for deployment in deployments}
    for rate in rates:
        rows: dict[str, list[Row]] = {}
        for number in range(rounds):
            for deployment in deployments:
                earlier = found[deployment.name]
                if earlier and list(earlier.values())[-1]["ttft_p50_ms"] > _MOST_TTFT_S * 1e3:
                    continue
                report_progress(f"{rate:g} requests/s, round {number + 1}: {deployment.name}")
                deployment.resume()
                row = asyncio.run(measure(deployment, rate, seconds, str(number)))
                deployment.pause()
                rows.setdefault(deployment.name, []).append(row)
        for name, own in rows.items():
            found[name][rate] = {figure: median([row[figure] for row in own]) for figure in own[0]}
    return found


def rates_table(found: Mapping[str, Mapping[float, Row]]) -> str:
    headers = ["deployment", "requests/s", "in time", "TTFT p50 ms", "p99", "TBT p50 ms", "p99", "tokens/s"]
    figures = ("ttft_p50_ms", "ttft_p99_ms", "tbt_p50_ms", "tbt_p99_ms", "tokens_per_s")
    rows = [
        [name, f"{rate:g}", f"{row['in_time']:.0%}", *(f"{row[figure]:.0f}" for figure in figures)]
        for name, by_rate in found.items()
        for rate, row in by_rate.items()
    ]
    return table(headers, rows)


def draw_chart(found: Mapping[str, Mapping[float, Row]], path: Path) -> None:
    """Writes an SVG image: by rate, the share of requests in time, the TTFT and the gaps between tokens."""
    panels = (("in_time", "requests in time"), ("ttft_p50_ms", "TTFT p50, ms"), ("tbt_p99_ms", "gap p99, ms"))

    def draw(figure: Any) -> None:
        for panel, (figure_name, title) in zip(figure.subplots(1, 3), panels, strict=True):
            for index, (name, by_rate) in enumerate(found.items()):
                rates, values = list(by_rate), [row[figure_name] for row in by_rate.values()]
                panel.plot(rates, values, marker="o", markersize=3, label=name, **line_style(index))
            panel.set_title(title, fontsize=9)
            panel.set_xlabel("requests/s")
            if figure_name != "in_time":
                panel.set_yscale("log")
            else:
                panel.set_ylim(0, 1.03)
            label_axes(panel, percent_y=figure_name == "in_time")
        legend(figure)

    image = draw_image("rates", draw, size_in=(9.0, 2.9))
    path.write_bytes(base64.b64decode(image.src.partition(",")[2]))
