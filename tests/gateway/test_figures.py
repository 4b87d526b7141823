"""The last minute, as a gateway remembers it."""

from __future__ import annotations

from gateway.cluster.figures import _MAX_PREFIXES, _NUM_LATEST, WINDOW_S, Ended, Figures
from protocol.keys import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def test_percentiles_are_of_the_last_minute() -> None:
    figures = Figures()
    figures.ttft.add(100.0, now=0.0)
    for count in range(1, 101):
        figures.ttft.add(count / 100, now=50.0)
    shown = figures.as_json(now=WINDOW_S + 1.0)["ttft_s"]
    assert shown["count"] == 100
    assert 0.49 < shown["p50"] < 0.52
    assert 0.98 < shown["p99"] <= 1.0


def test_without_samples_there_are_no_percentiles() -> None:
    assert Figures().as_json(1.0)["tbt_s"] == {"p50": None, "p95": None, "p99": None, "count": 0}


def test_prefixes_cool_down_and_the_hottest_come_first() -> None:
    figures = Figures()
    for now in range(4):
        figures.reused(key(1), 64, ["prefill-0"], float(now))
    figures.reused(key(2), 32, ["prefill-0", "store-0"], 300.0)
    first, second = figures.hot_prefixes(300.0)
    assert (first["tokens"], first["holders"]) == (32, ["prefill-0", "store-0"])
    assert second["heat"] < 0.2


def test_the_memory_of_prefixes_is_bounded() -> None:
    figures = Figures()
    for number in range(_MAX_PREFIXES + 10):
        figures.reused(key(number), 32, [], float(number))
    assert len(figures._prefixes) == _MAX_PREFIXES
    assert key(9) not in figures._prefixes


def test_the_latest_requests_come_first_and_the_others_are_forgotten() -> None:
    figures = Figures()
    for number in range(_NUM_LATEST + 3):
        figures.ended(
            Ended(
                request_id=f"req-{number}",
                outcome="stop",
                prompt_tokens=1,
                cached_tokens=0,
                output_tokens=1,
                ttft_s=0.1,
                e2e_s=0.2,
            )
        )
    shown = figures.latest_requests()
    assert len(shown) == _NUM_LATEST
    assert shown[0]["request_id"] == f"req-{_NUM_LATEST + 2}"
    assert shown[-1]["request_id"] == "req-3"
