"""Formats the Markdown tables: one per part, and the list of bars."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.measure import median, table
from benchmarks.store.speed.workload import OPS

# Bars of every part: the claims and the measured values. Pure; works on the JSON's figures.

Bar = dict[str, Any]
"""Keys claim, measured, bar, met. `met` is None if there is nothing to compare with."""
Figures = Mapping[str, Mapping[str, Any]]

TCP, COPIED, IN_PLACE = "moonserve tcp", "moonserve same host, unchecked", "moonserve in place"
TCP_PEERS = ("mooncake tcp", "mooncake tcp, 4 lanes", "redis")
MEMCPY = ("memcpy", "memcpy huge pages")
LOCAL_PEERS = ("mooncake same host", "mooncake in the client")
BAR_SIZES = ("32×64 KiB", "1 MiB", "16 MiB")
RATIOS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], float], ...] = (
    (TCP, TCP_PEERS, ("put", "get"), 1.5),
    (COPIED, MEMCPY, ("get",), 0.8),
    (COPIED, LOCAL_PEERS, ("get",), 1.0),
)
"""(contestant, rivals of which the best counts, operations, least ratio)."""
IN_PLACE_GROWTH = 1.25
"""A get in place should not depend on size: this factor for 256 times the bytes allows for noise."""
EXISTS_P50_US = 50.0
METADATA_BYTES = 200
LRU_HIT_RATIOS = {3_000_000: 0.138, 10_000_000: 0.291, 30_000_000: 0.366, None: 0.373}
HIT_RATIO_TOLERANCE = 0.005
SAME_HIT_RATE = 0.001


def bar(claim: str, measured: float | None, asked: str, met: bool | None) -> Bar:
    return {"claim": claim, "measured": measured, "bar": asked, "met": met}


def at_least(claim: str, measured: float | None, least: float) -> Bar:
    return bar(claim, measured, f"≥ {least:g}", None if measured is None else measured >= least)


def at_most(claim: str, measured: float | None, most: float) -> Bar:
    return bar(claim, measured, f"≤ {most:g}", None if measured is None else measured <= most)


def speed_bars(results: Figures, sizes: Sequence[str]) -> list[Bar]:
    return [
        *_ratio_bars(results, [size for size in BAR_SIZES if size in sizes]),
        *_in_place_bars(results),
        *_exists_bars(results),
    ]


def _ratio_bars(results: Figures, sizes: Sequence[str]) -> Iterator[Bar]:
    for who, others, ops, least in RATIOS:
        if who not in results or not any(other in results for other in others):
            continue  # not selected for this run
        for size in sizes:
            for op in ops:
                best, reached = _ratio(results, who, others, size, op)
                yield at_least(f"{who} / {best}, {size} {op}", reached, least)


def _ratio(results: Figures, who: str, others: Sequence[str], size: str, op: str) -> tuple[str, float | None]:
    """Returns the best rival and the median over rounds of the ratio to it; None if either was not measured."""
    ours = _cell(results, who, size, op)
    rivals = {other: cell for other in others if (cell := _cell(results, other, size, op))}
    if not rivals or ours is None:
        return " or ".join(others), None
    best = max(rivals, key=lambda name: float(rivals[name]["values_s"]))
    pairs = zip(ours["values_s_rounds"], rivals[best]["values_s_rounds"], strict=False)
    return best, median([a / b for a, b in pairs])


def _cell(results: Figures, who: str, size: str, op: str) -> Mapping[str, Any] | None:
    cells = results[who]["cells"] if who in results else {}
    cell: Mapping[str, Any] | None = cells.get(size, {}).get(op)
    return cell


def _in_place_bars(results: Figures) -> Iterator[Bar]:
    small, large = (_cell(results, IN_PLACE, size, "get") for size in ("64 KiB", "16 MiB"))
    if small and large:
        pairs = zip(large["p50_us_rounds"], small["p50_us_rounds"], strict=False)
        growth = median([a / b for a, b in pairs])
        yield at_most(f"{IN_PLACE}, p50 at 16 MiB / at 64 KiB", growth, IN_PLACE_GROWTH)


def _exists_bars(results: Figures) -> Iterator[Bar]:
    for who in ("moonserve same host", TCP):
        if who in results:
            cell = results[who]["exists"]
            reached = cell["p50_us"] if cell else None
            yield at_most(f"{who}, exists p50, µs", reached, EXISTS_P50_US)


def metadata_bars(points: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Returns the bar of the largest measured store."""
    largest = max((p for p in points if "failed" not in p), key=lambda p: p["blocks"], default=None)
    if largest is None:
        return [at_most("metadata, bytes per block", None, METADATA_BYTES)]
    claim = f"metadata, resident bytes per block at {largest['blocks']:,} blocks"
    return [at_most(claim, largest["resident_bytes"], METADATA_BYTES)]


def disk_bars(disk: Mapping[str, Any]) -> list[Bar]:
    return [
        at_least(
            f"SSD tier / fio, {row['operation']} {row['block_bytes'] >> 10} KiB, depth {row['depth']}",
            row["ratio"],
            disk["bar"],
        )
        for row in disk["rows"]
    ]


def restart_bars(restart: Mapping[str, Any]) -> list[Bar]:
    hits = restart["replay"]
    lost = hits["before"] - hits["after"]
    return [
        bar("restart: first hit", restart["first_hit_s"], "s", None),
        bar("restart: full index", restart["full_index_s"], "s", None),
        at_most("restart: hit rate before − after", lost, SAME_HIT_RATE),
        at_most("restart: values lost", restart["num_before"] - restart["num_found"], 0),
        at_most("restart: values with wrong bytes", restart["num_wrong"], 0),
    ]


def hit_ratio_bars(points: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Compares LRU with published hit ratios, and the best policy with LRU. Ratios are shares of prompt tokens."""
    ratios = {(p["policy"], p["capacity_tokens"]): p["token_hit_ratio"] for p in points}
    bars = []
    for capacity, published in LRU_HIT_RATIOS.items():
        policy, room = ("unlimited", "unlimited") if capacity is None else ("lru", f"{capacity:,}")
        if (reached := ratios.get((policy, capacity))) is not None:
            claim = f"hit ratio of lru at {room} tokens − {published}"
            bars.append(at_most(claim, abs(reached - published), HIT_RATIO_TOLERANCE))
    return [*bars, *_policy_bars(ratios)]


def _policy_bars(ratios: Mapping[tuple[str, int | None], float]) -> Iterator[Bar]:
    for capacity in (3_000_000, 10_000_000):
        others = {
            name: ratio for (name, at), ratio in ratios.items() if at == capacity and name not in ("lru", "belady")
        }
        if others and ("lru", capacity) in ratios:
            best = max(others, key=lambda name: others[name])
            gain = others[best] / ratios["lru", capacity]
            yield bar(f"hits of {best} / of lru, {capacity:,} tokens", gain, "> 1", gain > 1)


VERDICTS = {None: "", True: "met", False: "**missed**"}


def speed_report(speed: Mapping[str, Any]) -> str:
    sizes: list[str] = speed["sizes"]
    tables = [
        _speed_table(speed["results"], sizes, figure, unit, form)
        for figure, unit, form in (
            ("gb_s", "GB/s", ".2f"),
            ("values_s", "values/s", ",.0f"),
            ("p50_us", "p50 of a call, µs", ",.0f"),
            ("p99_us", "p99 of a call, µs", ",.0f"),
        )
    ]
    lines = [f"Placement: {speed['placement']}; medians of {speed['rounds']} rounds."]
    lines += [f"Other processes used {speed['others_cores']:.2f} cores meanwhile."]
    for name, result in speed["results"].items():
        absent = {"in the end": result["absent"]} if result["absent"] else {}
        lines += [f"- {name}, {at}: {why}" for at, why in (result["errors"] | absent).items()]
    return "\n\n".join([*tables, "\n".join(lines)])


def _speed_table(results: Mapping[str, Any], sizes: Sequence[str], figure: str, unit: str, form: str) -> str:
    """Returns a table with a row per store, a column per size, and one for `exists`, except for GB/s."""
    rows = []
    for name, result in results.items():
        cells = [_both(result["cells"][size], figure, form) for size in sizes]
        exists = result["exists"]
        if figure != "gb_s":
            cells.append(format(exists[figure], form) if exists else "–")
        rows.append([name, *cells])
    last = [] if figure == "gb_s" else ["exists"]
    return table([f"{unit}, put / get", *sizes, *last], rows)


def _both(cell: Mapping[str, Any], figure: str, form: str) -> str:
    return " / ".join(format(cell[op][figure], form) if cell.get(op) else "–" for op in OPS)


def restart_report(restart: Mapping[str, Any]) -> str:
    hits = restart["replay"]
    rows = [
        ["on disk before, GiB", f"{restart['gib']:.1f} of {restart['num_values']:,} values"],
        ["put, GB/s", f"{restart['put_gb_s']:.2f}"],
        ["stopping, with what was only in memory, s", f"{restart['stop_s']:.1f}"],
        ["start to serving, s", f"{restart['serving_s']:.2f}"],
        ["start to the first hit, s", f"{restart['first_hit_s']:.2f}"],
        ["start to the full index, s", f"{restart['full_index_s']:.2f}"],
        ["values put / there before / found / read again / wrong", _found(restart)],
        [f"hit rate of {hits['trace']} before", f"{hits['before']:.4f}"],
        ["… as soon as it served", f"{hits['at_once']:.4f}"],
        ["… after the full index", f"{hits['after']:.4f}"],
    ]
    return table(("restart", ""), rows)


def _found(restart: Mapping[str, Any]) -> str:
    names = ("num_values", "num_before", "num_found", "num_read", "num_wrong")
    return " / ".join(f"{restart[name]:,}" for name in names)


def blocks_report(points: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("resident bytes/block", "resident_bytes", ".0f"),
        ("metadata bytes/block", "metadata_bytes", ".0f"),
        ("put µs/block", "put_us", ".1f"),
        ("lease + release of 16, µs", "lease_us", ".0f"),
        ("look-ups/s one by one", "find_s", ",.0f"),
        ("in batches of 64", "find_batch_s", ",.0f"),
    )
    rows = [[f"{p['blocks']:,}", p["policy"], *_values(p, [(key, form) for _, key, form in columns])] for p in points]
    return table(("blocks of one node", "policy", *(title for title, _, _ in columns)), rows)


def nodes_report(points: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("put/s", "put_s", ",.0f"),
        ("get/s", "get_s", ",.0f"),
        ("exists/s", "exists_s", ",.0f"),
        ("exists p50 µs", "exists_p50_us", ".0f"),
        ("cold connect ms", "connect_ms", ".0f"),
        ("first get ms", "first_get_ms", ".1f"),
        ("directory bytes/key", "directory_bytes_per_key", ".0f"),
        ("directory resident MiB", "directory_resident_mib", ".0f"),
    )
    rows = [[str(p["nodes"]), *_values(p, [(key, form) for _, key, form in columns])] for p in points]
    return table(("nodes", *(title for title, _, _ in columns)), rows)


def _values(point: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    if "failed" in point:
        return [str(point["failed"]), *[""] * (len(columns) - 1)]
    return [format(point[key], form) for key, form in columns]


def bars_report(bars: Sequence[Bar]) -> str:
    rows = [[each["claim"], _reached(each), each["bar"], VERDICTS[each["met"]]] for each in bars]
    missed = sum(each["met"] is False for each in bars)
    return "\n".join([table(("bar", "reached", "asked", ""), rows), "", f"Bars missed: {missed}"])


def _reached(each: Bar) -> str:
    return "–" if each["measured"] is None else f"{each['measured']:.3g}"
