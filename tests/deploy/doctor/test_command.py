"""`moonserve doctor`: what works is said to work, what does not is said with what to do, and the exit code follows."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.doctor.findings import Finding, as_json, as_text
from deploy.ports import free_port
from transfer import TransferEngine, TransferOptions
from transfer.rdma.device import discover

TOKEN = "token of the peer's cluster"
Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def peer() -> Iterator[TransferEngine]:
    with TransferEngine(cluster_token=TOKEN, name="peer") as engine:
        engine.allocate(4096, readable=True)
        yield engine


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Its exit code and report; it measures nothing."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--no-measure", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def finding(report: dict[str, Any], section: str, subject: str) -> dict[str, Any]:
    found = [entry for entry in report["findings"][section] if entry["subject"] == subject]
    assert len(found) == 1, report["findings"][section]
    return dict(found[0])


def test_all_that_a_cluster_stands_on_is_examined_measured_and_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json", "--disk", str(tmp_path), "--port", str(free_port())]) == 0
    report = json.loads(capsys.readouterr().out)
    sections = {"software", "machine", "gpu", "surroundings", "rdma", "transports"}
    assert sections <= set(report["findings"])
    for line in (line for lines in report["findings"].values() for line in lines):
        assert line["state"] == "ok" or line["remedy"]
    for transport in ("shm", "tcp"):
        text = finding(report, "transports", transport)["text"]
        assert re.search(r"READ \d+\.\d\d GB/s, 64 KiB in \d+ µs", text)
    assert "not used" not in finding(report, "rails", "lo")["text"]
    assert "reads" in finding(report, "surroundings", "disk")["text"]
    assert not list(tmp_path.iterdir()), "the file that was read is gone"
    assert "lo" in finding(report, "topology", "cpu:0")["text"]


@pytest.mark.skipif(bool(discover()), reason="this machine has RDMA devices")
def test_rdma_is_nobodys_worry_until_it_is_asked_for(doctor: Doctor) -> None:
    code, report = doctor()
    assert (code, finding(report, "transports", "rdma")["state"]) == (0, "ok")
    assert finding(report, "rdma", "devices")["state"] == "ok"
    assert main(["doctor", "--transports", "tpc"]) == 2
    code, report = doctor("--transports", "rdma,tcp")
    asked = finding(report, "transports", "rdma")
    assert (code, asked["state"], bool(asked["remedy"])) == (1, "fail", True)


def test_a_foreign_rail_is_a_problem(doctor: Doctor) -> None:
    code, report = doctor("--transfer-rails", "192.0.2.77")
    assert code == 1
    assert "192.0.2.77 is no address of this machine" in finding(report, "rails", "rails")["text"]
    assert finding(report, "transports", "tcp")["state"] == "fail"


@pytest.mark.parametrize(
    ("token", "code", "subject", "key", "words"),
    [
        (TOKEN, 0, "tcp handshake", "text", "authenticated; 1 readable segment"),
        (TOKEN, 0, "shm handshake", "text", "authenticated; 1 readable segment"),
        ("another", 1, "tcp handshake", "remedy", "MOONSERVE_CLUSTER_TOKEN"),
        (None, 0, "handshake", "text", "not tried"),
    ],
)
def test_a_peer_is_reached_on_each_endpoint_and_shakes_hands_with_its_token(
    doctor: Doctor, peer: TransferEngine, monkeypatch: pytest.MonkeyPatch,
    token: str | None, code: int, subject: str, key: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("MOONSERVE_CLUSTER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("MOONSERVE_CLUSTER_TOKEN", token)
    found, report = doctor("--peer", peer.address)
    assert found == code
    assert "on this host" in finding(report, "peer", "shm")["text"]
    assert " on lo " in finding(report, "peer", "tcp lo")["text"]
    assert words in finding(report, "peer", subject)[key]


def test_a_peer_that_has_ended_is_a_problem_on_each_endpoint_that_is_asked_for(doctor: Doctor) -> None:
    with TransferEngine(cluster_token=TOKEN) as gone:
        address = gone.address
    code, report = doctor("--peer", address)
    assert (code, finding(report, "peer", "shm")["state"]) == (1, "fail")
    assert "refused" in finding(report, "peer", "tcp lo")["text"]
    _, report = doctor("--peer", address, "--transports", "tcp")
    assert finding(report, "peer", "shm")["state"] == "warn"


def test_a_bare_host_and_port_is_dialled(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        assert finding(doctor("--peer", where)[1], "peer", "tcp")["state"] == "ok"
    code, report = doctor("--peer", where)
    assert (code, "refused" in finding(report, "peer", "tcp")["text"]) == (1, True)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("ms9;id=00;host=x", "same version"),
        ("nonsense", "whole address"),
        ("ms2;id=zz;host=x", "whole address"),
        ("127.0.0.1:99999", "port below 65536"),
    ],
)
def test_an_address_that_is_none_is_told_from_one_that_is_not_reached(
    doctor: Doctor, address: str, remedy: str
) -> None:
    code, report = doctor("--peer", address)
    (entry,) = report["findings"]["peer"]
    assert code == 1
    assert remedy in entry["remedy"]


def test_a_peer_on_another_machine_needs_no_shared_memory(doctor: Doctor) -> None:
    with TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=("tcp",))) as peer:
        parts = peer.address.split(";")
        parts = ["host=elsewhere" if part.startswith("host=") else part for part in parts]
        code, report = doctor("--peer", ";".join([*parts, "shm=shm@nowhere"]))
    assert (code, finding(report, "peer", "shm")["state"]) == (0, "ok")


def test_the_text_names_each_problem_at_the_end_and_json_has_the_same() -> None:
    findings = [
        Finding("machine", "cores", "2 of 2"),
        Finding("machine", "memory", "1 GiB", "buy some"),
        Finding("transports", "rdma", "no device", "plug one in", fails=True),
    ]
    lines = list(as_text(findings))
    assert "  ok    cores   2 of 2" in lines
    assert "  fail  rdma    no device" in lines
    assert any("→ plug one in" in line for line in lines)
    assert lines[-2:] == ["could be better: machine: memory", "does not work: transports: rdma"]
    assert list(as_text(findings[:1]))[-1] == "everything that was asked for works"
    told = as_json(findings)
    assert not told["healthy"]
    cores, memory = told["findings"]["machine"]
    assert cores == {"subject": "cores", "state": "ok", "text": "2 of 2"}
    assert memory == {"subject": "memory", "state": "warn", "text": "1 GiB", "remedy": "buy some"}
