"""The verdicts of the transfer benchmark."""

from typing import Any

from benchmarks.transfer.bars import bars


def figures(*rounds: float) -> dict[str, Any]:
    cell = {"gb_s": sorted(rounds)[len(rounds) // 2], "gb_s_rounds": list(rounds)}
    throughput = {"1 MiB": {"read": cell, "write": cell}, "64 KiB": {"read": cell, "write": cell}}
    return {"throughput": throughput, "latency": {"p50_us": 20.0}, "absent": None}


ABSENT: dict[str, Any] = {"throughput": {}, "latency": None, "absent": "not installed"}


def verdicts(results: dict[str, Any]) -> dict[str, bool | None]:
    return {bar["claim"]: bar["met"] for bar in bars(results, ["64 KiB", "1 MiB"])}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    results = {"moonserve tcp": figures(9, 1, 8), "raw sockets": figures(10, 1, 10)}
    found = {bar["claim"]: bar["measured"] for bar in bars(results, ["1 MiB"])}
    assert found["moonserve tcp / raw sockets, 1 MiB read"] == 0.9


def test_a_bar_holds_from_its_size_on() -> None:
    found = verdicts({"moonserve tcp": figures(8, 8, 8), "raw sockets": figures(10, 10, 10)})
    assert found["moonserve tcp / raw sockets, 1 MiB read"] is False
    assert found["moonserve tcp / raw sockets, 64 KiB read"] is None


def test_the_best_memcpy_is_the_limit() -> None:
    results = {"moonserve shm": figures(9), "memcpy": figures(9), "memcpy huge pages": figures(12)}
    assert verdicts(results)["moonserve shm / memcpy or memcpy huge pages, 1 MiB write"] is False


def test_a_peer_that_is_not_installed_fails_nobody() -> None:
    found = verdicts({"moonserve tcp": figures(5), "nixl tcp": ABSENT})
    assert found["moonserve tcp / nixl tcp, 1 MiB read"] is None


def test_what_could_not_be_measured_of_moonserve_is_a_miss() -> None:
    found = verdicts({"moonserve tcp": ABSENT, "raw sockets": figures(5)})
    assert found["moonserve tcp / raw sockets, 1 MiB read"] is False
    assert found["moonserve tcp, 64 KiB read p50, µs"] is False
