"""Figures of each contestant (medians over rounds, with its best mode), the claimed ratios, and both as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.measure import median, table
from benchmarks.transfer.contest import Result, Sample, describe
from benchmarks.transfer.workload import KIB, LATENCY, MIB, SIZES, throughput
from moonserve.protocol.latency import percentile

OPS = ("read", "write")


def figures_of(result: Result, sizes: Sequence[str]) -> dict[str, Any]:
    """Returns one contestant's part of the JSON."""
    return {
        "group": result.contestant.group,
        "absent": result.absent,
        "errors": {describe(load): error for load, error in result.errors.items()},
        "throughput": {size: {op: best for op in OPS if (best := _throughput(result, size, op))} for size in sizes},
        "latency": _latency(result),
    }


def _throughput(result: Result, size: str, op: str) -> dict[str, Any] | None:
    load = throughput(op, *SIZES[size])
    by_mode = {mode: samples for (of, mode), samples in result.samples.items() if of == load}
    if not by_mode or load in result.errors:
        return None
    mode = max(by_mode, key=lambda mode: median([sample.gb_s for sample in by_mode[mode]]))
    return {"mode": mode, **summarise(by_mode[mode])}


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    speeds = [sample.gb_s for sample in samples]
    return {
        "gb_s": median(speeds),
        "gb_s_rounds": [round(speed, 3) for speed in speeds],
        "cpu_s_per_gb": median([sample.cpu_s_per_gb for sample in samples]),
    }


def _latency(result: Result) -> dict[str, Any] | None:
    if not result.latencies or LATENCY in result.errors:
        return None
    by_mode = {
        mode: {
            "p50_us": median([percentile(took, 50) * 1e6 for took in rounds]),
            "p99_us": median([percentile(took, 99) * 1e6 for took in rounds]),
        }
        for mode, rounds in result.latencies.items()
    }
    mode = min(by_mode, key=lambda mode: by_mode[mode]["p50_us"])
    return {"mode": mode, **by_mode[mode]}


# Bars: the claimed ratios and the measured ones. Pure; works on the JSON's figures.

SHM, TCP = "moonserve shm", "moonserve tcp"
MEMCPY = ("memcpy", "memcpy huge pages")
RATIOS: tuple[tuple[str, tuple[str, ...], float, int], ...] = (
    (TCP, ("raw sockets",), 0.85, MIB),
    (TCP, ("mooncake tcp",), 1.3, 128 * KIB),
    (TCP, ("nixl tcp",), 1.0, 4 * KIB),
    (SHM, MEMCPY, 0.85, MIB),
    (SHM, ("nixl shm",), 1.0, 4 * KIB),
    (f"{TCP} + checksums", (TCP,), 0.85, 64 * KIB),
    (f"{SHM} + checksums", (SHM,), 0.6, MIB),
)
"""(contestant, rivals of which the best counts, least ratio, least block size)."""
LATENCIES_US = {SHM: 25.0, TCP: 90.0}
LATENCY_RIVALS = {SHM: "nixl shm", TCP: "nixl tcp"}
"""Contestants whose median latency is to be reached."""

Results = Mapping[str, Mapping[str, Any]]


def bars(results: Results, sizes: Sequence[str]) -> list[dict[str, Any]]:
    return [*_ratio_bars(results, sizes), *_latency_bars(results)]


def _ratio_bars(results: Results, sizes: Sequence[str]) -> Iterator[dict[str, Any]]:
    for who, others, bar, from_bytes in RATIOS:
        others = tuple(other for other in others if other in results)
        if who not in results or not others:
            continue  # not selected for this run
        for size in sizes:
            block_bytes, blocks = SIZES[size]
            applies = blocks == 1 and block_bytes >= from_bytes
            for op in ("read", "write"):
                claim = f"{who} / {' or '.join(others)}, {size} {op}"
                asked = f"≥ {bar}" if applies else ""
                reached = _ratio(results, who, others, size, op)
                met = (reached is not None and reached >= bar) if applies else None
                if reached is None and _cell(results, who, size, op):
                    asked, met = "nothing to compare with", None
                yield _bar(claim, reached, asked, met)


def _latency_bars(results: Results) -> Iterator[dict[str, Any]]:
    for who, bar in LATENCIES_US.items():
        if who in results:
            latency = results[who]["latency"]
            reached = latency["p50_us"] if latency else None
            met = reached is not None and reached <= bar
            yield _bar(f"{who}, 64 KiB read p50, µs", reached, f"≤ {bar:.0f}", met)
            rival = results.get(LATENCY_RIVALS[who], {}).get("latency")
            if rival and reached:
                ratio = rival["p50_us"] / reached
                yield _bar(f"{LATENCY_RIVALS[who]} / {who}, 64 KiB read p50", ratio, "≥ 1.0", ratio >= 1.0)


def _bar(claim: str, reached: float | None, asked: str, met: bool | None) -> dict[str, Any]:
    """Returns one bar. `met` is None if nothing is required and the ratio is only informative."""
    return {"claim": claim, "measured": reached, "bar": asked, "met": met}


def _ratio(results: Results, who: str, others: Sequence[str], size: str, op: str) -> float | None:
    """Returns the median over rounds of the ratio to the best rival; None if either was not measured."""
    ours = _cell(results, who, size, op)
    rivals = [cell for other in others if (cell := _cell(results, other, size, op))]
    if ours is None or not rivals:
        return None
    best = max(rivals, key=lambda cell: float(cell["gb_s"]))
    pairs = zip(ours["gb_s_rounds"], best["gb_s_rounds"], strict=False)
    return median([a / b for a, b in pairs])


def _cell(results: Results, who: str, size: str, op: str) -> Mapping[str, Any] | None:
    cell: Mapping[str, Any] | None = results[who]["throughput"].get(size, {}).get(op)
    return cell


CPU_AT = "1 MiB"


def report(document: Mapping[str, Any]) -> str:
    sizes = list(document["in_flight"])
    rows = [_row(name, figures, sizes) for name, figures in document["results"].items()]
    headers = ["GB/s, read / write", *sizes, "64 KiB read p50 / p99 µs", f"CPU s/GB at {CPU_AT}"]
    in_flight = ", ".join(f"{size}: {count}" for size, count in document["in_flight"].items())
    lines = [table(headers, rows), "", f"Requests in flight: {in_flight}; latency one at a time."]
    lines += [f"Placement: {document['placement']}; medians of {document['rounds']} rounds.", ""]
    lines += [f"Other processes used {document['others_cores']:.2f} cores meanwhile.", ""]
    lines += [line for name, figures in document["results"].items() for line in _failures(name, figures)]
    missed = [bar["claim"] for bar in document["bars"] if bar["met"] is False]
    lines += ["", table(("bar", "reached", "asked", ""), [_bar_row(bar) for bar in document["bars"]])]
    lines += ["", f"Bars missed: {len(missed)}"]
    return "\n".join(lines)


def _row(name: str, figures: Mapping[str, Any], sizes: Sequence[str]) -> list[str]:
    if figures["absent"] and not any(figures["throughput"].values()):
        return [name, figures["absent"], *[""] * (len(sizes) + 1)]
    latency = figures["latency"]
    return [
        name,
        *[_both(figures, size, "gb_s") for size in sizes],
        f"{latency['p50_us']:.0f} / {latency['p99_us']:.0f}" if latency else "–",
        _both(figures, CPU_AT, "cpu_s_per_gb") if CPU_AT in sizes else "–",
    ]


def _both(figures: Mapping[str, Any], size: str, figure: str) -> str:
    cells = [figures["throughput"][size].get(op) for op in OPS]
    return " / ".join(f"{cell[figure]:.2f}" if cell else "–" for cell in cells)


def _failures(name: str, figures: Mapping[str, Any]) -> list[str]:
    absent = {"in the end": figures["absent"]} if figures["absent"] else {}
    return [f"- {name}, {at}: {why}" for at, why in (figures["errors"] | absent).items()]


def _bar_row(bar: Mapping[str, Any]) -> list[str]:
    verdict = {None: "", True: "met", False: "**missed**"}[bar["met"]]
    reached = "–" if bar["measured"] is None else f"{bar['measured']:.2f}"
    return [bar["claim"], reached, bar["bar"], verdict]
