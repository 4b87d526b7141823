"""A store that lies, dies or is missing is a row of the table, never the end of the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.store import seats, servers
from benchmarks.store.contestants import CONTESTANTS, MEMCPY, Contestant
from benchmarks.store.figures import figures
from benchmarks.store.seats import Result
from benchmarks.store.workload import EXISTS, Load
from benchmarks.transfer.pair import Placement
from tests.ports import free_port

MIB = 1 << 20
PUT, GET = Load("put", MIB, 16), Load("get", MIB, 16)
SEGMENT_BYTES = 512 * MIB
PATIENT_S = 100.0  # a machine that many tests share is slow


def contestant(client: str) -> Contestant:
    return Contestant(
        name="x", group="peer", client=client, options={"shared": True}, ops=("put", "get")
    )


def result_of(one: Contestant, folder: Path, loads: tuple[Load, ...] = (PUT, GET)) -> Result:
    with seats.seated([one], folder, Placement.APART) as seated:
        seats.verify(seated, loads)
        seats.measure(seated, loads, rounds=2, min_s=0.001)
    return seated[0].result


def test_an_honest_client_has_a_sample_per_load_and_round(tmp_path: Path) -> None:
    result = result_of(contestant(MEMCPY), tmp_path)
    assert result.absent is None
    assert not result.errors
    for load in (PUT, GET):
        assert [sample.load for sample in result.samples[load, ""]] == [load, load]
        assert all(sample.gb_s > 0 and sample.p50_us > 0 for sample in result.samples[load, ""])
    cells = figures(result, ["16×1 MiB"])["cells"]["16×1 MiB"]
    assert cells["get"]["values_s"] == pytest.approx(cells["get"]["gb_s"] * 1e9 / MIB)


@pytest.mark.parametrize(
    ("kind", "reason"), [("Lying", "8 values are not"), ("Dying", "died: the disk is on fire")]
)
def test_a_client_that_fails_says_why_and_has_no_samples(
    kind: str, reason: str, tmp_path: Path
) -> None:
    result = result_of(contestant(f"tests.benchmarks.store_clients:{kind}"), tmp_path, (GET,))
    assert reason in result.errors[GET]
    assert not result.samples


def test_a_client_that_hangs_is_killed_when_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "ANSWER_S", 5.0)
    result = result_of(contestant("tests.benchmarks.store_clients:Hanging"), tmp_path, (GET,))
    assert result.errors[GET] == "no answer within 5 s"


def test_a_client_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    result = result_of(contestant("benchmarks.store.peers.nobody:Client"), tmp_path)
    assert "No module named" in (result.absent or "")


def test_a_peer_without_its_environment_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "PEERS", tmp_path / "nothing")
    peer = next(each for each in CONTESTANTS if each.in_peers_environment)
    assert result_of(peer, tmp_path).absent == "not installed"


@pytest.mark.slow  # a client and a node with 256 MiB and more each, all of it compared
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["moonserve in place", "moonserve same host", "moonserve tcp"])
def test_this_projects_store_gives_back_what_was_put(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SEGMENT_BYTES", SEGMENT_BYTES)
    monkeypatch.setattr(seats, "ANSWER_S", PATIENT_S)
    [one] = [each for each in CONTESTANTS if each.name == name]
    loads = (PUT, GET, Load("get", MIB), EXISTS)
    result = result_of(one, tmp_path, loads)
    assert not result.errors
    assert {load for load, _ in result.samples} == {load for load in loads if one.can(load)}


@pytest.mark.slow  # as above
def test_redis_gives_back_what_was_put_in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (.ci/system-packages)")
    monkeypatch.setattr(servers, "free_port", free_port)
    monkeypatch.setattr(seats, "ANSWER_S", PATIENT_S)
    redis = Contestant(
        name="redis",
        group="peer",
        client="benchmarks.store.peers.redis:Client",
        servers=servers.redis,
    )
    result = result_of(redis, tmp_path, (PUT, GET, Load("get", MIB)))
    assert not result.errors
    assert {mode for load, mode in result.samples if load == GET} == {"multi", "pipeline"}
