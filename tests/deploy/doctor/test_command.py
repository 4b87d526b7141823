"""`moonserve doctor`: what works is said to work, what does not is said with what to do, and the exit code follows."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.doctor import machine_checks, peer_checks
from deploy.doctor.findings import Finding, State, as_json, as_text
from transfer import TransferEngine, TransferOptions
from transfer.rails.topology import parse
from transfer.rdma.device import discover

TOKEN = "token of the peer's cluster"

without_rdma = pytest.mark.skipif(bool(discover()), reason="this machine has RDMA devices")


@pytest.fixture
def peer() -> Iterator[TransferEngine]:
    with TransferEngine(cluster_token=TOKEN, name="peer") as engine:
        engine.allocate(4096, readable=True)
        yield engine


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--no-measure", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def finding(report: dict[str, Any], section: str, subject: str) -> dict[str, Any]:
    found = [entry for entry in report["findings"][section] if entry["subject"] == subject]
    assert len(found) == 1, report["findings"][section]
    return dict(found[0])


def test_a_machine_that_can_do_what_serve_needs_is_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, report = doctor(capsys)
    assert code == 0
    assert report["healthy"]
    assert finding(report, "transports", "shm")["state"] == "ok"
    assert finding(report, "transports", "tcp")["state"] == "ok"
    assert finding(report, "rails", "lo")["facts"]["used"]
    assert finding(report, "software", "numpy")["facts"]["version"]


def test_the_measurement_fits_into_seconds_and_is_on_every_usable_transport(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for transport in ("shm", "tcp"):
        (line,) = [line for line in lines if line.split()[:2] == ["ok", transport]]
        assert "GB/s" in line
        assert "µs" in line
    assert lines[-1] == "everything that was asked for works"


@without_rdma
def test_rdma_is_nobodys_worry_until_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys)
    assert finding(report, "transports", "rdma")["state"] == "ok"
    assert finding(report, "rdma", "devices")["state"] == "ok"
    assert code == 0
    code, report = doctor(capsys, "--transports", "rdma,tcp")
    assert finding(report, "transports", "rdma")["state"] == "fail"
    assert finding(report, "transports", "rdma")["remedy"]
    assert code == 1


def test_the_printed_topology_can_be_given_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, report = doctor(capsys)
    assert parse(json.dumps(report["topology"]), ["lo"]).as_json() == report["topology"]
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(report["topology"]))
    assert doctor(capsys, "--transfer-topology", str(file))[0] == 0


def test_a_rail_that_is_not_this_machines_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys, "--transfer-rails", "192.0.2.77")
    assert code == 1
    assert "192.0.2.77 is no address of this machine" in finding(report, "rails", "rails")["text"]
    assert finding(report, "transports", "tcp")["state"] == "fail"


def test_an_unknown_transport_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transports", "tpc"]) == 2
    assert "choose from shm, rdma, tcp" in capsys.readouterr().err


def test_help_names_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "--peer" in capsys.readouterr().out


def test_a_peer_is_reached_on_each_endpoint_and_shakes_hands(
    capsys: pytest.CaptureFixture[str], peer: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONSERVE_CLUSTER_TOKEN", TOKEN)
    code, report = doctor(capsys, "--peer", peer.address)
    assert code == 0
    assert "on this host" in finding(report, "peer", "shm")["text"]
    assert finding(report, "peer", "tcp lo")["facts"]["interface"] == "lo"
    for transport in ("shm", "tcp"):
        shaken = finding(report, "peer", f"{transport} handshake")
        assert shaken["text"] == "authenticated; 1 readable segment"


def test_a_wrong_token_is_told_from_an_unreachable_peer(
    capsys: pytest.CaptureFixture[str], peer: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONSERVE_CLUSTER_TOKEN", "another")
    code, report = doctor(capsys, "--peer", peer.address)
    assert code == 1
    assert finding(report, "peer", "tcp lo")["state"] == "ok"
    assert "MOONSERVE_CLUSTER_TOKEN" in finding(report, "peer", "tcp handshake")["remedy"]


def test_without_a_token_the_endpoints_are_dialled_and_that_is_said(
    capsys: pytest.CaptureFixture[str], peer: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONSERVE_CLUSTER_TOKEN", raising=False)
    code, report = doctor(capsys, "--peer", peer.address)
    assert code == 0
    assert "not tried" in finding(report, "peer", "handshake")["text"]


def test_a_peer_that_has_ended_is_a_problem_on_each_endpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TransferEngine(cluster_token=TOKEN) as gone:
        address = gone.address
    code, report = doctor(capsys, "--peer", address)
    assert code == 1
    assert "refused" in finding(report, "peer", "tcp lo")["text"]
    assert finding(report, "peer", "shm")["state"] == "fail"
    code, report = doctor(capsys, "--peer", address, "--transports", "tcp")
    assert finding(report, "peer", "shm")["state"] == "warn"


def test_a_bare_host_and_port_is_dialled(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        code, report = doctor(capsys, "--peer", where)
    assert code == 0
    assert finding(report, "peer", "tcp")["state"] == "ok"
    code, report = doctor(capsys, "--peer", where)
    assert code == 1
    assert "refused" in finding(report, "peer", "tcp")["text"]


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
    capsys: pytest.CaptureFixture[str], address: str, remedy: str
) -> None:
    code, report = doctor(capsys, "--peer", address)
    assert code == 1
    (entry,) = report["findings"]["peer"]
    assert remedy in entry["remedy"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (TimeoutError("timed out"), "firewall"),
        (OSError(errno.ETIMEDOUT, ""), "firewall"),
        (OSError(errno.ENETUNREACH, ""), "--host"),
        (OSError(errno.EHOSTUNREACH, ""), "is the peer up"),
        (socket.gaierror(-2, "unknown"), "host name"),
    ],
)
def test_each_way_of_failing_has_advice_of_its_own(error: Exception, remedy: str) -> None:
    assert remedy in peer_checks._explained(error)[1]


def test_a_peer_on_another_machine_needs_no_shared_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=("tcp",))) as peer:
        parts = peer.address.split(";")
        parts = ["host=elsewhere" if part.startswith("host=") else part for part in parts]
        code, report = doctor(capsys, "--peer", ";".join([*parts, "shm=shm@nowhere"]))
    assert code == 0
    assert finding(report, "peer", "shm")["state"] == "ok"


def test_what_is_short_is_a_note_with_advice() -> None:
    cases = [
        machine_checks._cores(4, 8, "100000 100000"),
        machine_checks._cores(1, 8, ""),
        machine_checks._memory("MemTotal: 1000 kB\nMemAvailable: 900 kB", "max"),
        machine_checks._memory("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB", "1000000"),
        machine_checks._locked_memory(8 << 20, "CapEff:\t0000000000000000", rdma_wanted=True),
        machine_checks._files(1024, 1_048_576),
    ]
    for case in cases:
        assert case.state is State.WARN, case
        assert case.remedy
    assert "ulimit -n 65536" in cases[-1].remedy


def test_what_is_enough_is_ok() -> None:
    cases = [
        machine_checks._cores(4, 8, "max 100000"),
        machine_checks._cores(4, 8, "250000 100000"),
        machine_checks._memory("MemTotal: 99999999 kB\nMemAvailable: 9999999 kB", "max"),
        machine_checks._files(65536, 65536),
        machine_checks._locked_memory(8 << 20, "CapEff:\t0000000000000000", rdma_wanted=False),
        machine_checks._locked_memory(8 << 20, "CapEff:\t000001ffffffffff", rdma_wanted=True),
        machine_checks._locked_memory(-1, "", rdma_wanted=True),
    ]
    assert all(case.state is State.OK for case in cases)


def test_the_text_names_each_problem_at_the_end_and_json_has_the_same() -> None:
    findings = [
        Finding("machine", "cores", State.OK, "2 of 2"),
        Finding("machine", "memory", State.WARN, "1 GiB", "buy some"),
        Finding("transports", "rdma", State.FAIL, "no device", "plug one in"),
    ]
    lines = list(as_text(findings))
    assert "  ok    cores   2 of 2" in lines
    assert "  warn  memory  1 GiB" in lines
    assert "  fail  rdma    no device" in lines
    assert any("→ plug one in" in line for line in lines)
    assert lines[-2:] == ["could be better: machine: memory", "does not work: transports: rdma"]
    assert as_json(findings) == {
        "healthy": False,
        "findings": {
            "machine": [
                {"subject": "cores", "state": "ok", "text": "2 of 2"},
                {"subject": "memory", "state": "warn", "text": "1 GiB", "remedy": "buy some"},
            ],
            "transports": [
                {
                    "subject": "rdma",
                    "state": "fail",
                    "text": "no device",
                    "remedy": "plug one in",
                }
            ],
        },
    }


def test_a_processor_without_wide_vectors_is_a_note_with_advice() -> None:
    fast = machine_checks._features("model name: x\nflags\t\t: fpu avx2 fma amx_bf16\nbugs:\n")
    assert (fast.state, fast.facts["features"]) == (State.OK, ["avx2", "fma", "amx_bf16"])
    slow = machine_checks._features("model name: x\nflags\t\t: fpu sse2\n")
    assert slow.state is State.WARN
    assert "AVX2" in slow.remedy
